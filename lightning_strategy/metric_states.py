"""`MetricStates`: what logged values and torchmetrics held before a step, for when it is discarded."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torchmetrics import Metric

# Where Lightning gathers values for the progress bar, loggers and callbacks.
_SHOWN = ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics")


class MetricStates:
    """Keeps the attributes that `self.log` and metrics bind anew at each update.

    The core's journal knows tensors written in place; these are Python attributes, and after a
    discarded step they would hold tensors that never got a value.

    Args:
        trainer: whose active results are kept.
        module: whose metrics are kept.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer = trainer
        self._metrics = [part for part in module.modules() if isinstance(part, Metric)]
        self._results: Any = None
        self._logged: dict[str, Any] = {}
        self._kept: list[tuple[Any, dict[str, Any], dict[str, list[Any]]]] = []
        self._shown: list[dict[str, Any]] = []

    def keep(self) -> None:
        """Remembers how things stand."""
        self._results = self._trainer._results
        self._shown = [dict(getattr(self._trainer._logger_connector, name)) for name in _SHOWN]
        self._logged = dict(self._results) if self._results is not None else {}
        self._kept = [
            (metric, dict(vars(metric)), {name: list(value) for name, value in _lists(metric)})
            for metric in (*self._metrics, *self._logged.values())
        ]

    def put_back(self) -> None:
        """Makes things stand as when `keep` was called last."""
        for name, values in zip(_SHOWN, self._shown, strict=True):
            setattr(self._trainer._logger_connector, name, values)
        if self._results is not None:
            self._results.clear()
            self._results.update(self._logged)
        for metric, attributes, lists in self._kept:
            vars(metric).clear()
            vars(metric).update(attributes)
            for name, items in lists.items():
                getattr(metric, name)[:] = items


def _lists(metric: Metric) -> list[tuple[str, list[Any]]]:
    states = ((name, getattr(metric, name, None)) for name in metric._defaults)
    return [(name, value) for name, value in states if isinstance(value, list)]
