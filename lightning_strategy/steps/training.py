"""`TrainingBatches`: which step of the core each training batch of the Trainer belongs to."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_strategy.replay.loops import keep_outputs
from lightning_strategy.replay.rules import ReplayRules, allowed
from lightning_strategy.sharding.phases import PhaseSharding
from lightning_strategy.steps.driver import StepDriver
from lightning_strategy.steps.gradients import nobody_sees_grads
from xla_adapters import XLAConfig
from xla_adapters.replay.call_spec import CallSpec


class TrainingBatches:
    """Opens a step for a training batch, and ends it with the update of the weights.

    Args:
        trainer: runs the loops.
        config: the options.
        driver: opens and closes the steps.
        sharding: of the module, if the strategy shards.
    """

    def __init__(self, trainer: Trainer, config: XLAConfig, driver: StepDriver, sharding: PhaseSharding) -> None:
        self._trainer = trainer
        self._config = config
        self._driver = driver
        self._sharding = sharding
        self._rules: ReplayRules | None = None
        self._frees_grads = False
        # The batch that ended last left its step open for the next one.
        self._is_left_open = False

    @property
    def _module(self) -> LightningModule:
        module = self._trainer.lightning_module
        assert module is not None
        return module

    def model_is_ready(self, rules: ReplayRules | None) -> None:
        """The optimizers exist: decides whether steps free the gradients.

        Args:
            rules: say which steps may be replayed; None if none may.
        """
        self._rules = rules
        self._frees_grads = self._decide_free_grads()

    def _decide_free_grads(self) -> bool:
        if not self._config.compiles_step or not self._module.automatic_optimization:
            return False
        if self._config.free_grads == "auto":
            return nobody_sees_grads(self._trainer, self._module)
        return bool(self._config.free_grads)

    # ---- the batch -----------------------------------------------------------------------------

    def begin(self, batch: Any, batch_idx: int) -> None:
        """Opens the step of a batch, unless the batch before left its own open.

        Args:
            batch: on the device.
            batch_idx: its index in the epoch.

        Raises:
            ConfigError: it is the first batch, and cannot be split over the devices.
        """
        self._is_left_open = False
        self._sharding.begin_training(batch, self._module, epoch=self._trainer.current_epoch)
        phase, facts = self._phase(batch_idx)
        self._driver.begin_batch(
            batch,
            index=self._trainer.fit_loop.total_batch_idx,
            phase=phase,
            facts=facts,
            where=self._where(batch_idx),
            replay=self._replay(batch, (*facts.values(), self._frees_grads)),
        )

    def _phase(self, batch_idx: int) -> tuple[str, dict[str, Hashable]]:
        """What the step of a batch computes, and what else decides its graph."""
        if not self._module.automatic_optimization:
            return "manual optimization", {}
        # The loop sets gradients to None in the first micro batch.
        first = batch_idx % self._trainer.accumulate_grad_batches == 0
        facts: dict[str, Hashable] = {"gradients": "absent" if first else "present"}
        if self._trainer.fit_loop._should_accumulate() and self._config.accumulation == "per_micro_batch":
            return ("accumulate, first" if first else "accumulate"), facts
        return "update", facts

    def _replay(self, batch: Any, known: tuple[Hashable, ...]) -> CallSpec | None:
        if self._rules is None or self._driver.is_open:
            return None
        return allowed(self._driver.train, self._rules.training(batch, known))

    def leaves_open(self) -> bool:
        """Whether the batch that ends is one of several in an unrolled accumulation, and not the last."""
        unrolled = self._config.accumulation == "unrolled" and self._driver.train.is_open
        accumulates = unrolled and self._module.automatic_optimization and self._trainer.fit_loop._should_accumulate()
        self._is_left_open = accumulates
        return accumulates

    def end_accumulation(self) -> None:
        """Executes what is traced of an unrolled accumulation that goes on with the next batch."""
        if self._is_left_open:
            self._driver.end_batch()

    # ---- the update ----------------------------------------------------------------------------

    @contextmanager
    def update(self, closure: Any) -> Iterator[None]:
        """Around clipping and update, and what the closure computes before.

        Args:
            closure: what the optimizer was given.
        """
        where = self._where(self._trainer.fit_loop.batch_idx)
        is_own_step = self._driver.begin_update(where)
        with self._driver.discarding():
            yield
            if self._frees_grads:
                # Not the module's own method: the user may have overridden it.
                torch.nn.Module.zero_grad(self._module, set_to_none=True)
            if self._module.automatic_optimization:
                keep_outputs(self._driver, closure)
            if is_own_step or self._module.automatic_optimization:
                self._driver.end_batch()

    def _where(self, batch_idx: int) -> str:
        return f"batch {batch_idx} of epoch {self._trainer.current_epoch}"
