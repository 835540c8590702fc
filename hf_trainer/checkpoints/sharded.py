"""`ShardedCheckpoints`: weights written one at a time, the optimizer's state shard by shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.trainer import SCHEDULER_NAME

from hf_trainer.checkpoints.deferred_weights import deferred_state_dict, writing_deferred_weights
from hf_trainer.checkpoints.from_device import saving_as_on_the_cpu
from hf_trainer.model_sharding import ModelSharding
from hf_trainer.optimizers import innermost
from hf_trainer.placement import model_of
from xla_adapters import get_runtime
from xla_adapters.sharding.state import load_optimizer, optimizer_state, save_state

# Other than the name of transformers' file: its own Trainer then refuses the checkpoint with a message.
OPTIMIZER_FOLDER = "optimizer"


class ShardedCheckpoints:
    """Under `ShardingConfig(checkpoints="sharded")` the host never holds the whole state while it is saved.

    Weights are ordinary safetensors files, which `from_pretrained` reads. Models that are not a `PreTrainedModel`
    (adapters of PEFT, plain modules) have their weights saved as without the option.

    Args:
        trainer: the trainer.
        base: the methods that the mixin overrides.
        sharding: says whether the option is on.
    """

    def __init__(self, trainer: transformers.Trainer, base: Any, sharding: ModelSharding) -> None:
        self._trainer = trainer
        self._base = base
        self._sharding = sharding

    def save_model(self, output_dir: str | None, _internal_call: bool) -> None:
        """As `Trainer.save_model`."""
        trainer, model = self._trainer, model_of(self._trainer)
        if not self._sharding.saves_shards or not isinstance(model, PreTrainedModel):
            # An override need not know the argument.
            internal = {"_internal_call": True} if _internal_call else {}
            with saving_as_on_the_cpu(trainer):
                self._base.save_model(output_dir, **internal)
            return
        get_runtime().tracing.flush()
        with writing_deferred_weights():
            trainer._save(output_dir, deferred_state_dict(model))
        if trainer.args.push_to_hub and not _internal_call:
            trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)

    def save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """As `Trainer._save_optimizer_and_scheduler`."""
        if not self._sharding.saves_shards:
            self._base._save_optimizer_and_scheduler(output_dir)
            return
        state = optimizer_state(model_of(self._trainer), self._optimizer)
        save_state({OPTIMIZER_FOLDER: state}, Path(output_dir) / OPTIMIZER_FOLDER)
        scheduler: Any = self._trainer.lr_scheduler
        torch.save(scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """As `Trainer._load_optimizer_and_scheduler`. Sharded state is loaded with or without the option, on any number
        of devices."""
        if checkpoint is None or not (Path(checkpoint) / OPTIMIZER_FOLDER).is_dir():
            self._base._load_optimizer_and_scheduler(checkpoint)
            return
        load_optimizer(model_of(self._trainer), self._optimizer, Path(checkpoint) / OPTIMIZER_FOLDER)
        scheduler: Any = self._trainer.lr_scheduler
        scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        optimizer = innermost(self._trainer.optimizer)
        assert isinstance(optimizer, torch.optim.Optimizer)
        return optimizer
