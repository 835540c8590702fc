"""`PhaseSharding`: the sharding of a module across the training and evaluation phases of a run."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from lightning.pytorch import LightningModule

from lightning_strategy.sharding.module_sharding import ModuleSharding


class PhaseSharding:
    """Shards the module again where a run changes between training and evaluation.

    Callbacks may have replaced the weights there (averages, say), and what they copy in is not sharded. Does nothing
    if the strategy does not shard.

    Args:
        sharding: of the strategy; None if it does not shard.
        is_step_open: whether a step is being traced now.
    """

    def __init__(self, sharding: ModuleSharding | None, is_step_open: Callable[[], bool]) -> None:
        self._sharding = sharding
        self._is_step_open = is_step_open
        self._phase: Hashable = None

    def begin_training(self, batch: Any, module: LightningModule, *, epoch: int) -> None:
        """A training batch is about to be computed.

        Raises:
            ConfigError: it is the first one, and cannot be split over the devices.
        """
        if self._sharding is not None:
            self._sharding.check_first_batch(batch)
        self.enter(("train", epoch), module)

    def enter(self, phase: Hashable, module: LightningModule) -> None:
        """A batch of a phase is about to be computed.

        Args:
            phase: any name; another one than at the last call begins a new phase.
            module: what is trained or evaluated.
        """
        if self._sharding is not None and phase != self._phase and not self._is_step_open():
            self._sharding.shard_again(module)
            self._phase = phase
