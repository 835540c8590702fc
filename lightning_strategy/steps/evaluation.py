"""`EvaluationBatches`: one step of the core for each batch that the Trainer validates, tests or predicts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_strategy.replay.rules import ReplayRules, allowed
from lightning_strategy.sharding.phases import PhaseSharding
from lightning_strategy.steps.driver import StepDriver
from lightning_strategy.steps.stall_watch import StallWatch
from xla_adapters import StepProgram, XLAConfig
from xla_adapters.replay.call_spec import CallSpec


class EvaluationBatches:
    """Opens and closes a step around each batch of a validation, test or prediction.

    Args:
        trainer: runs the loops.
        config: the options.
        driver: opens and closes the steps.
        sharding: of the module, if the strategy shards.
        stalls: watches that a batch does not take too long.
    """

    def __init__(
        self,
        trainer: Trainer,
        config: XLAConfig,
        driver: StepDriver,
        sharding: PhaseSharding,
        stalls: StallWatch,
    ) -> None:
        self._trainer = trainer
        self._config = config
        self._driver = driver
        self._sharding = sharding
        self._stalls = stalls
        self._rules: ReplayRules | None = None

    @property
    def _module(self) -> LightningModule:
        module = self._trainer.lightning_module
        assert module is not None
        return module

    def model_is_ready(self, rules: ReplayRules | None) -> None:
        """The model is on the device.

        Args:
            rules: say which steps may be replayed; None if none may.
        """
        self._rules = rules

    def begin(self) -> None:
        """A validation, test or prediction begins: its batches are counted from 0."""
        self._driver.begin_evaluation()

    @contextmanager
    def step(self, name: str, args: tuple[Any, ...]) -> Iterator[StepProgram]:
        """Around one batch.

        Args:
            name: `"validation_step"`, `"test_step"` or `"predict_step"`.
            args: what the loop hands to it: the batch and its index, or an iterator over batches.
        """
        self._stalls.stop()
        self._sharding.enter(name, self._module)
        takes_batch = len(args) > 1 and isinstance(args[1], int)
        batch, where = (args[0], f"batch {args[1]}") if takes_batch else (None, "")
        replay = self._replay(name, args) if takes_batch else None
        with self._stalls.watching(name), self._driver.evaluation_step(name, batch, where, replay) as program:
            yield program

    def _replay(self, name: str, args: tuple[Any, ...]) -> CallSpec | None:
        program = self._driver.evaluation[name]
        if self._rules is None or not self._config.compile_eval or program.is_open:
            return None
        return allowed(program, self._rules.evaluation(name, args[0], args[2:]))
