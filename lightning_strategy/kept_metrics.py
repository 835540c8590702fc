"""`KeptMetrics`: what torchmetrics held before a step, for when it is discarded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchmetrics import Metric


class KeptMetrics:
    """Keeps the attributes that metrics bind anew at each update, as they are now.

    The core's journal knows tensors written in place; these are Python attributes, and after a
    discarded step they would hold tensors that never got a value.

    Args:
        metrics: those to keep.
    """

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._kept = [(metric, dict(vars(metric)), dict(_lists(metric))) for metric in metrics]

    def put_back(self) -> None:
        """Makes them hold what they held."""
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
