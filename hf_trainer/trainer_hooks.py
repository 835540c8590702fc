"""`TrainerHooks`: what the groups of hooks share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

import torch
import transformers

from hf_trainer.own_code import StepCode
from hf_trainer.step_driver import StepDriver
from xla_adapters import XLAConfig
from xla_adapters.backend import Backend
from xla_adapters.run_stats import RunStats
from xla_adapters.sharding import ShardingConfig
from xla_adapters.sharding.sharder import Sharder

if TYPE_CHECKING:
    _Base = transformers.Trainer
else:
    _Base = object


class TrainerHooks(_Base):
    """The state behind the hooks. `XLATrainerMixin` sets it up and puts the groups together."""

    xla_config: XLAConfig
    sharding_config: ShardingConfig | None
    run_stats: RunStats
    _backend: Backend
    _random_algorithm: str
    _sharder: Sharder | None
    _held: ExitStack
    _steps: StepDriver
    _tr_loss: torch.Tensor
    _queued_for_counting: list[Mapping[str, Any]]
    # Evaluation works on host tensors; only its steps bring inputs to the device.
    _keep_inputs_on_host: bool = False
    _preprocess_in_step: Any = None
    # What was found out about the user's own code in the steps.
    _own_code: StepCode | None = None
    _own_evaluation: StepCode | None = None
    # Parameters that were DTensors when the model came.
    _placed: Sequence[str] = ()

    @property
    def _live_model(self) -> torch.nn.Module:
        """The model, which is there once the base class is constructed."""
        model = self.model
        assert isinstance(model, torch.nn.Module)
        return model

    if TYPE_CHECKING:

        def _session(self) -> AbstractContextManager[None]: ...
        def _found_by_step(self, inputs: Any) -> Any: ...
