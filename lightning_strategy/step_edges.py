"""`StepEdges`: the strategy's own callback, which stands before all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_strategy.step_driver import StepDriver


class StepEdges(Callback):
    """Ends steps where Lightning offers strategies no hook, before any other callback looks.

    Args:
        steps: opens and closes the steps.
        goes_on: whether the batch that ends leaves its step open for the next one (unrolled accumulation).
    """

    def __init__(self, steps: StepDriver, goes_on: Callable[[], bool]) -> None:
        self._steps = steps
        self._goes_on = goes_on

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """The batch is computed."""
        if not self._goes_on():
            self._steps.end_batch()

    def on_sanity_check_start(self, *args: Any, **kwargs: Any) -> None:
        """Evaluation is no part of a training step."""
        self._steps.end_batch()

    def on_validation_start(self, *args: Any, **kwargs: Any) -> None:
        """Evaluation is no part of a training step."""
        self._steps.end_batch()

    def on_train_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        """A batch that was skipped, or an accumulation that was cut short, has no update; losses and norms stay."""
        self._steps.end_batch()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """As at the end of an epoch."""
        self._steps.end_batch()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Nothing of the step under way is left behind, and later callbacks find the values of before it."""
        self._steps.abort()


@contextmanager
def standing_last(trainer: Trainer, callback: Callback) -> Iterator[None]:
    """Puts a callback behind all others until the exit."""
    trainer.callbacks.append(callback)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if callback in trainer.callbacks:  # type: ignore[attr-defined]
            trainer.callbacks.remove(callback)  # type: ignore[attr-defined]


@contextmanager
def standing_first(trainer: Trainer, callback: Callback) -> Iterator[None]:
    """Puts a callback before all others until the exit."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks.insert(0, callback)
    try:
        yield
    finally:
        if callback in trainer.callbacks:  # type: ignore[attr-defined]
            trainer.callbacks.remove(callback)  # type: ignore[attr-defined]
