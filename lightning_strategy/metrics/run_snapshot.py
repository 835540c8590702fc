"""`RunSnapshot`: logged values and the module's metrics as they were before a step of the Trainer."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torchmetrics import Metric

from lightning_strategy.metrics.snapshot import MetricSnapshot

# The connector's values for the progress bar, loggers and callbacks.
_CONNECTOR_VALUES = ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics")


class RunSnapshot:
    """Takes a snapshot of logged values and metrics before each step, and restores it if the step is discarded.

    Args:
        trainer: whose logged values are kept.
        module: whose metrics are kept.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer = trainer
        self._metrics = [part for part in module.modules() if isinstance(part, Metric)]
        self._results: Any = None
        self._logged: dict[str, Any] = {}
        self._snapshot = MetricSnapshot([])
        self._connector_values: list[dict[str, Any]] = []

    def take(self) -> None:
        """Takes a snapshot, which replaces the last one."""
        self._results = self._trainer._results
        self._connector_values = [dict(getattr(self._trainer._logger_connector, name)) for name in _CONNECTOR_VALUES]
        self._logged = dict(self._results) if self._results is not None else {}
        self._snapshot = MetricSnapshot([*self._metrics, *self._logged.values()])

    def restore(self) -> None:
        """Goes back to the last snapshot."""
        for name, values in zip(_CONNECTOR_VALUES, self._connector_values, strict=True):
            setattr(self._trainer._logger_connector, name, values)
        if self._results is not None:
            self._results.clear()
            self._results.update(self._logged)
        self._snapshot.restore()
