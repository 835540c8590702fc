"""`MetricStates`: what logged values and torchmetrics held before a step, for when it is discarded."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torchmetrics import Metric

from lightning_strategy.kept_metrics import KeptMetrics

# Where Lightning gathers values for the progress bar, loggers and callbacks.
_SHOWN = ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics")


class MetricStates:
    """Keeps what `self.log` and the module's metrics bind anew at each update (see `KeptMetrics`).

    Args:
        trainer: whose active results are kept.
        module: whose metrics are kept.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer = trainer
        self._metrics = [part for part in module.modules() if isinstance(part, Metric)]
        self._results: Any = None
        self._logged: dict[str, Any] = {}
        self._kept = KeptMetrics([])
        self._shown: list[dict[str, Any]] = []

    def keep(self) -> None:
        """Remembers how things stand."""
        self._results = self._trainer._results
        self._shown = [dict(getattr(self._trainer._logger_connector, name)) for name in _SHOWN]
        self._logged = dict(self._results) if self._results is not None else {}
        self._kept = KeptMetrics([*self._metrics, *self._logged.values()])

    def put_back(self) -> None:
        """Makes things stand as when `keep` was called last."""
        for name, values in zip(_SHOWN, self._shown, strict=True):
            setattr(self._trainer._logger_connector, name, values)
        if self._results is not None:
            self._results.clear()
            self._results.update(self._logged)
        self._kept.put_back()
