"""`MetricReader`: reads logged values in one transfer, and only when the progress bar or a logger needs them.

Lightning reads every `prog_bar` value at each step, one transfer per value, whether the bar is redrawn or not, and
once more for each logger. Here the values stay on the device until the bar is redrawn or a logger is due.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch.trainer.connectors.logger_connector import logger_connector, result

from xla_adapters import get_runtime
from xla_adapters.insight.times import STEP, WallClock
from xla_adapters.runtime.transfers import to_host_in_one_transfer
from xla_adapters.utils.patching import replaced

_Key = tuple[int, int, int]


class MetricReader:
    """Reads logged values from the device, and caches them until the next step.

    Args:
        is_step_open: whether a step is being traced now; then nothing new can be read.
        clock: told that results of steps are waited for.
    """

    def __init__(self, is_step_open: Callable[[], bool], clock: WallClock) -> None:
        self._is_step_open = is_step_open
        self._clock = clock
        self._known: dict[_Key, tuple[torch.Tensor, torch.Tensor]] = {}
        self._last: dict[str, Any] = {}

    def forget(self) -> None:
        """Empties the cache: a step begins."""
        self._known.clear()

    def scalars(self, metrics: Any, companions: Callable[[], Any] = dict) -> Any:
        """The metrics as Python numbers.

        Args:
            metrics: nested collections with tensors of one element.
            companions: returns metrics that are going to be read next, to be read in the same transfer.
        """
        if self._is_unknown(metrics):
            found: list[torch.Tensor] = []
            _tensors_in([metrics, companions()], found)
            wanted = {_key(tensor): tensor for tensor in found if get_runtime().device.owns(tensor)}
            new = [key for key in wanted if key not in self._known]
            with self._clock.during(STEP):
                values = to_host_in_one_transfer([wanted[key] for key in new])
            for key, value in zip(new, values, strict=True):
                self._known[key] = (wanted[key], value)
        return convert_tensors_to_scalars(self._on_host(metrics))

    def shown(self, metrics: dict[str, Any], companions: Callable[[], Any]) -> dict[str, Any]:
        """As `scalars`; while a step is being traced, the values of the last call."""
        if self._is_step_open() and self._is_unknown(metrics):
            return dict(self._last)
        self._last = self.scalars(metrics, companions)
        return self._last

    def _is_unknown(self, metrics: Any) -> bool:
        found: list[torch.Tensor] = []
        _tensors_in(metrics, found)
        return any(get_runtime().device.owns(tensor) and _key(tensor) not in self._known for tensor in found)

    def _on_host(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            known = self._known.get(_key(value)) if get_runtime().device.owns(value) else None
            return value if known is None else known[1]
        if isinstance(value, dict):
            return {name: self._on_host(item) for name, item in value.items()}
        return value


def _key(tensor: torch.Tensor) -> _Key:
    """Identifies the value of a tensor: each `detach()` returns a new tensor of the same value."""
    return int(tensor.untyped_storage()._cdata), tensor._version, int(tensor.storage_offset())


def _tensors_in(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, dict):
        _tensors_in(list(value.values()), found)
    elif isinstance(value, list):
        for item in value:
            _tensors_in(item, found)


def _keep_device_tensors(data: Any) -> Any:
    """Replaces `convert_tensors_to_scalars` where Lightning collects values for the progress bar."""
    if isinstance(data, torch.Tensor) and get_runtime().device.owns(data):
        return data
    return convert_tensors_to_scalars(data)


@contextmanager
def reading_logged_metrics(reader: MetricReader) -> Iterator[None]:
    """Until the exit, Lightning reads what it logs and shows through `reader`."""
    stock: Any = logger_connector._LoggerConnector.progress_bar_metrics

    def progress_bar_metrics(connector: Any) -> dict[str, Any]:
        def due_for_loggers() -> Any:
            return connector.metrics["log"] if connector.trainer.loggers and connector.should_update_logs else {}

        return reader.shown(stock.fget(connector), due_for_loggers)

    with ExitStack() as stack:
        stack.enter_context(replaced(result, "convert_tensors_to_scalars", _keep_device_tensors))
        stack.enter_context(replaced(logger_connector, "convert_tensors_to_scalars", reader.scalars))
        stack.enter_context(
            replaced(logger_connector._LoggerConnector, "progress_bar_metrics", property(progress_bar_metrics))
        )
        yield
