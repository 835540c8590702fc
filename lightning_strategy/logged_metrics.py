"""Brings logged values to the host: all that are wanted in one transfer, and only when they are wanted.

Lightning turns every `prog_bar` value into a number at each step, one transfer per value, whether the
bar is redrawn or not, and again for each logger. Here the values stay on the device until the bar is
redrawn or a logger is due, and then come together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch.trainer.connectors.logger_connector import logger_connector, result

from xla_adapters import get_backend
from xla_adapters.patching import replaced
from xla_adapters.transfers import to_host_in_one_transfer

_Key = tuple[int, int, int]


class MetricReader:
    """Reads logged values, and remembers what it has read until the next step.

    Args:
        is_step_open: whether a step is being traced now; then nothing new can be read.
    """

    def __init__(self, is_step_open: Callable[[], bool]) -> None:
        self._is_step_open = is_step_open
        self._known: dict[_Key, tuple[torch.Tensor, torch.Tensor]] = {}
        self._last: dict[str, Any] = {}

    def forget(self) -> None:
        """A new step begins: values read so far are history."""
        self._known.clear()

    def scalars(self, metrics: Any, companions: Callable[[], Any] = dict) -> Any:
        """The metrics as Python numbers.

        Args:
            metrics: nested; tensors of one element in it.
            companions: what will be asked for next, to come along in the same transfer.
        """
        if self._is_unknown(metrics):
            found: list[torch.Tensor] = []
            _tensors_in([metrics, companions()], found)
            wanted = {_key(tensor): tensor for tensor in found if get_backend().is_backend_tensor(tensor)}
            new = [key for key in wanted if key not in self._known]
            for key, value in zip(new, to_host_in_one_transfer([wanted[key] for key in new]), strict=True):
                self._known[key] = (wanted[key], value)
        return convert_tensors_to_scalars(self._on_host(metrics))

    def shown(self, metrics: dict[str, Any], companions: Callable[[], Any]) -> dict[str, Any]:
        """As `scalars`; while a step is being traced, the values of the last time."""
        if self._is_step_open() and self._is_unknown(metrics):
            return dict(self._last)
        self._last = self.scalars(metrics, companions)
        return self._last

    def _is_unknown(self, metrics: Any) -> bool:
        found: list[torch.Tensor] = []
        _tensors_in(metrics, found)
        return any(get_backend().is_backend_tensor(tensor) and _key(tensor) not in self._known for tensor in found)

    def _on_host(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            known = self._known.get(_key(value)) if get_backend().is_backend_tensor(value) else None
            return value if known is None else known[1]
        if isinstance(value, dict):
            return {name: self._on_host(item) for name, item in value.items()}
        return value


def _key(tensor: torch.Tensor) -> _Key:
    """The value behind a tensor: `detach()` makes another object of the same value at each call."""
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
    """In the place of `convert_tensors_to_scalars` where Lightning collects values for the progress bar."""
    if isinstance(data, torch.Tensor) and get_backend().is_backend_tensor(data):
        return data
    return convert_tensors_to_scalars(data)


@contextmanager
def reading_logged_metrics(reader: MetricReader) -> Iterator[None]:
    """Lets `reader` bring what Lightning logs and shows to the host, until the exit."""
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
