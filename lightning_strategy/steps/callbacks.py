"""`StepEnds`: the strategy's own callback, which runs before all others; and how callbacks are called first or last."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer import call

from lightning_strategy.steps.driver import StepDriver
from xla_adapters.utils.patching import replaced


class StepEnds(Callback):
    """Ends steps where Lightning has no hook for strategies, before any other callback reads a result.

    Args:
        driver: opens and closes the steps.
        leaves_open: whether the batch that ends leaves its step open for the next one (unrolled accumulation).
    """

    def __init__(self, driver: StepDriver, leaves_open: Callable[[], bool]) -> None:
        self._driver = driver
        self._leaves_open = leaves_open

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Ends the step of a batch that had no update (accumulation, manual optimization)."""
        if not self._leaves_open():
            self._driver.end_batch()

    def on_sanity_check_start(self, *args: Any, **kwargs: Any) -> None:
        """Evaluation is no part of a training step."""
        self._driver.end_batch()

    def on_validation_start(self, *args: Any, **kwargs: Any) -> None:
        """Evaluation is no part of a training step."""
        self._driver.end_batch()

    def on_train_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        """Ends the step of a skipped batch or of an incomplete accumulation: its losses can be read."""
        self._driver.end_batch()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """As at the end of an epoch."""
        self._driver.end_batch()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Discards the step, so that other callbacks find the values of before it."""
        self._driver.abort()


@contextmanager
def callbacks_around(trainer: Trainer, first: Callback, last: Callback) -> Iterator[None]:
    """Until the exit, one callback of ours runs before all callbacks of a Trainer, and one after them.

    They are not among `trainer.callbacks`: users list, compare, copy and profile those.
    """
    stock = call._call_callback_hooks

    @functools.wraps(stock)
    def call_hooks(
        caller: Trainer, hook: str, *args: Any, monitoring_callbacks: bool | None = None, **kwargs: Any
    ) -> None:
        # Lightning calls some hooks twice, the second time for callbacks that monitor a metric.
        is_ours = caller is trainer and monitoring_callbacks is not True
        if is_ours:
            getattr(first, hook)(caller, caller.lightning_module, *args, **kwargs)
        stock(caller, hook, *args, monitoring_callbacks=monitoring_callbacks, **kwargs)
        if is_ours:
            getattr(last, hook)(caller, caller.lightning_module, *args, **kwargs)

    with replaced(call, "_call_callback_hooks", call_hooks):
        yield
