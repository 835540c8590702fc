"""`MetricSnapshot`: what torchmetrics held before a step, for when the step is discarded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchmetrics import Metric


class MetricSnapshot:
    """The attributes of metrics as they are now, and a way back to them.

    The core's `UndoLog` restores tensors that are written in place. A metric binds new tensors to its attributes
    instead, and after a discarded step those would be tensors that never get a value.

    Args:
        metrics: whose attributes are kept.
    """

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._kept = [(metric, dict(vars(metric)), dict(_lists(metric))) for metric in metrics]

    def restore(self) -> None:
        """Sets the attributes, and the items of lists, to what they were."""
        for metric, attributes, lists in self._kept:
            vars(metric).clear()
            vars(metric).update(attributes)
            for name, items in lists.items():
                getattr(metric, name)[:] = items


def _lists(metric: Metric) -> Iterable[tuple[str, list[Any]]]:
    for name in metric._defaults:
        value = getattr(metric, name, None)
        if isinstance(value, list):
            yield name, list(value)
