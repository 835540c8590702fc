"""Patches of torchmetrics and of Lightning's logging: inside a step no value is read, between steps few transfers.

Outside of steps (`compute()` at the end of an epoch, `xla_mode="eager"`) torchmetrics' own code runs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector import logger_connector, result
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torchmetrics import Metric, MetricCollection, MinMaxMetric
from torchmetrics.aggregation import BaseAggregator, MaxMetric, MeanMetric, MinMetric, SumMetric

from xla_adapters import get_runtime, in_step
from xla_adapters.insight.times import STEP, WallClock
from xla_adapters.runtime.transfers import to_host_in_one_transfer, uploading
from xla_adapters.utils.patching import replaced

_VALIDATION = "_tensor_validation"
# Of `LightningModule`: makes a tensor of what is logged.
_TO_TENSOR = "_LightningModule__to_tensor"


@contextmanager
def metrics_without_reads() -> Iterator[None]:
    """Until the exit, torchmetrics can be traced:

    - in a step, the validation of arguments checks shapes and types, but not values;
    - in a step, `MeanMetric` and the like mask NaN by arithmetic, without a warning;
    - a reset between steps gives states buffers of their own, not those of the defaults;
    - in a step, states that are lists are copied without cloning their items (one more at each step);
    - in a step, `self.log(..., reduce_fx=max)` with Python's `max` or `min` does not look which value is larger;
    - in a step, the error of `self.log` of a tensor with several elements shows its shape, not its values;
    - in a step, `MinMaxMetric` compares on the device;
    - in a step, `MetricCollection` does not compare states to form groups: XLA computes equal values once.
    """
    with ExitStack() as stack:
        for owner, name, function in _validations():
            stack.enter_context(replaced(owner, name, _validating_shapes(function)))
        stack.enter_context(replaced(BaseAggregator, "_cast_and_nan_check_input", _leaving_nan_out()))
        stack.enter_context(replaced(Metric, "reset", _resetting_to_own_buffers()))
        stack.enter_context(replaced(Metric, "_copy_state_dict", _copying_without_clones()))
        stack.enter_context(replaced(_ResultMetric, "to", _moving_state_only()))
        stack.enter_context(replaced(_ResultMetric, "update", _reducing_without_reads()))
        stack.enter_context(replaced(LightningModule, _TO_TENSOR, _logging_one_element()))
        stack.enter_context(replaced(MinMaxMetric, "forward", _comparing_on_device()))
        stack.enter_context(replaced(MetricCollection, "_equal_metric_states", staticmethod(_never_equal_in_steps())))
        yield


def _logging_one_element() -> Callable[..., torch.Tensor]:
    convert: Callable[..., torch.Tensor] = getattr(LightningModule, _TO_TENSOR)

    @functools.wraps(convert)
    def checked(self: LightningModule, value: Any, name: str) -> torch.Tensor:
        if isinstance(value, torch.Tensor) and value.numel() != 1 and in_step():
            raise ValueError(
                f"`self.log({name}, ...)` was called with a tensor of the shape {list(value.shape)}, but the tensor "
                f"must have a single element. You can try doing `self.log({name}, ....mean())`"
            )
        return convert(self, value, name)

    return checked


def _validations() -> list[tuple[Any, str, Callable[..., None]]]:
    modules = [module for name, module in sys.modules.items() if name.startswith("torchmetrics.functional.")]
    modules += [module for name, module in sys.modules.items() if name.startswith("torchmetrics.classification.")]
    return [
        (module, name, function)
        for module in modules
        for name, function in vars(module).items()
        if name.endswith(_VALIDATION) and callable(function)
    ]


def _validating_shapes(validation: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(validation)
    def validate(*args: Any, **kwargs: Any) -> None:
        if in_step():
            args = tuple(_stand_in(value) for value in args)
            kwargs = {name: _stand_in(value) for name, value in kwargs.items()}
        validation(*args, **kwargs)

    return validate


def _stand_in(value: Any) -> Any:
    """For a tensor on the device, zeros of its shape and type on the host: valid as labels and as probabilities."""
    if isinstance(value, torch.Tensor) and get_runtime().device.owns(value):
        return torch.zeros((), dtype=value.dtype).expand(value.shape)
    return value


def _leaving_nan_out() -> Callable[..., Any]:
    stock = BaseAggregator._cast_and_nan_check_input

    @functools.wraps(stock)
    def cast(self: Any, x: Any, weight: Any = None) -> Any:
        neutral = _neutral(self)
        if not in_step() or neutral is None or self.nan_strategy == "disable":
            return stock(self, x, weight)
        x = torch.as_tensor(x, dtype=self.dtype, device=self.device)
        weight = torch.ones_like(x) if weight is None else torch.as_tensor(weight, dtype=self.dtype, device=self.device)
        nans = torch.isnan(x) | torch.isnan(weight)
        if isinstance(self.nan_strategy, float):
            return torch.where(nans, self.nan_strategy, x), torch.where(nans, 1.0, weight)
        # A step cannot raise. Under "error" the NaN stays, and shows in the result.
        if self.nan_strategy == "error":
            return x, weight
        return torch.where(nans, neutral, x), torch.where(nans, 0.0, weight)

    return cast


def _neutral(metric: Any) -> float | None:
    """The value whose aggregation changes nothing; None if there is none (for a list of values)."""
    if isinstance(metric, MaxMetric):
        return float("-inf")
    if isinstance(metric, MinMetric):
        return float("inf")
    return 0.0 if isinstance(metric, (MeanMetric, SumMetric)) else None


def _resetting_to_own_buffers() -> Callable[[Any], None]:
    """`Metric.reset` that uploads each default, so that each state has a buffer of its own.

    The stock method clones the defaults. On the device a clone shares the buffer until it is written: the graph of the
    first step would have one input where those of later steps have two.
    """
    stock = Metric.reset
    defaults: dict[int, tuple[Any, dict[str, torch.Tensor]]] = {}

    @functools.wraps(stock)
    def reset(self: Any) -> None:
        if in_step():
            stock(self)
            return
        with uploading():
            stock(self)
        runtime = get_runtime()
        if id(self) not in defaults:
            tensors = {name: value for name, value in self._defaults.items() if isinstance(value, torch.Tensor)}
            defaults[id(self)] = self, to_host_in_one_transfer(tensors)
        for name, value in defaults[id(self)][1].items():
            if runtime.device.owns(getattr(self, name)):
                setattr(self, name, runtime.transfers.to_device(value))

    return reset


def _copying_without_clones() -> Callable[[Any], dict[str, Any]]:
    stock = Metric._copy_state_dict

    @functools.wraps(stock)
    def copied(self: Any) -> dict[str, Any]:
        if not in_step():
            return stock(self)
        lists = {name: getattr(self, name) for name in self._defaults if isinstance(getattr(self, name), list)}
        for name in lists:
            setattr(self, name, [])
        states: dict[str, Any] = stock(self)
        for name, items in lists.items():
            setattr(self, name, items)
            # Its tensors are never changed in place.
            states[name] = list(items)
        return states

    return copied


def _moving_state_only() -> Callable[..., Any]:
    """`_ResultMetric.to` that leaves the defaults on the host.

    Lightning resets logged values inside the first step of an epoch. From defaults on the host that is an upload; from
    defaults on the device it would be another graph.
    """
    stock = _ResultMetric.to

    @functools.wraps(stock)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        defaults = self._defaults
        stock(self, *args, **kwargs)
        self._defaults = defaults
        return self

    return to


def _reducing_without_reads() -> Callable[..., None]:
    stock = _ResultMetric.update
    traceable: dict[Any, Any] = {max: torch.max, min: torch.min}

    @functools.wraps(stock)
    def update(self: Any, value: Any, batch_size: int) -> None:
        reduce = self.meta.reduce_fx
        if not in_step() or not self.is_tensor or reduce not in traceable:
            stock(self, value, batch_size)
            return
        before = self.value
        with replaced(self.meta, "reduce_fx", traceable[reduce]):
            stock(self, value, batch_size)
        if self.meta.on_epoch:
            # `max` and `min` of Python keep the earlier value where the new one is NaN.
            self.value = torch.where(torch.isnan(value), before, self.value)

    return update


def _comparing_on_device() -> Callable[..., Any]:
    stock = MinMaxMetric.forward

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not in_step():
            return stock(self, *args, **kwargs)
        # Each instance has its `compute` wrapped, since it was made.
        with replaced(self, "compute", functools.partial(_extremes, self)):
            return stock(self, *args, **kwargs)

    return forward


def _extremes(metric: Any) -> dict[str, Any]:
    """As `MinMaxMetric.compute`."""
    value = metric._base_metric.compute()
    if not metric._is_suitable_val(value):
        raise RuntimeError(f"Returned value from base metric should be a float or scalar tensor, but got {value}.")
    value = torch.as_tensor(value)
    most, least = metric.max_val.to(value.device), metric.min_val.to(value.device)
    # As of Python's comparisons: with NaN, the earlier value stays.
    metric.max_val = torch.where(most < value, value, most)
    metric.min_val = torch.where(least > value, value, least)
    return {"raw": value, "max": metric.max_val, "min": metric.min_val}


def _never_equal_in_steps() -> Callable[..., bool]:
    stock = MetricCollection._equal_metric_states

    @functools.wraps(stock)
    def equal(metric1: Any, metric2: Any) -> bool:
        return not in_step() and bool(stock(metric1, metric2))

    return equal


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
