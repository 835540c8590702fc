"""`RunMetrics`: everything about logged values and metrics in one run of the Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from lightning.pytorch import LightningModule, Trainer

from lightning_strategy.metrics.deferred import DeferredMetrics
from lightning_strategy.metrics.logged import MetricReader, reading_logged_metrics
from lightning_strategy.metrics.run_snapshot import RunSnapshot
from lightning_strategy.metrics.traceable import metrics_without_reads
from xla_adapters.insight.times import WallClock


class RunMetrics:
    """Lets `self.log` and torchmetrics work in the compiled steps of one run.

    Args:
        trainer: runs the loops.
        is_step_open: whether a step is being traced now.
        clock: told that results of steps are waited for.
    """

    def __init__(self, trainer: Trainer, is_step_open: Callable[[], bool], clock: WallClock) -> None:
        self._trainer = trainer
        self._reader = MetricReader(is_step_open, clock)
        self._deferred = DeferredMetrics()
        self._snapshot: RunSnapshot | None = None

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Patches how Lightning reads logged values and what torchmetrics does in steps, until the exit."""
        with reading_logged_metrics(self._reader), metrics_without_reads():
            yield

    def take_snapshots_of(self, module: LightningModule) -> None:
        """From the next step on the module's metrics are restored if a step is discarded."""
        self._snapshot = RunSnapshot(self._trainer, module)

    def deferring(self, module: LightningModule) -> AbstractContextManager[None]:
        """Defers updates of the module's metrics that cannot be traced to the end of the step, until the exit."""
        return self._deferred.of(module)

    def deferred_updates(self) -> int:
        """How many updates of metrics are deferred to the end of the step."""
        return self._deferred.waiting()

    def make_progress_bar_values_numbers(self) -> None:
        """Reads what the progress bar showed last, so that nothing of it needs the device any more."""
        connector = self._trainer._logger_connector
        connector._progress_bar_metrics = self._reader.scalars(connector._progress_bar_metrics)

    # ---- events of the steps -------------------------------------------------------------------

    def before_step(self) -> None:
        """A step is about to be opened."""
        self._reader.forget()
        if self._snapshot is not None:
            self._snapshot.take()

    def after_step(self) -> None:
        """A step was executed."""
        self._deferred.after_step()

    def after_discard(self) -> None:
        """A step was discarded."""
        self._deferred.discard()
        if self._snapshot is not None:
            self._snapshot.restore()
