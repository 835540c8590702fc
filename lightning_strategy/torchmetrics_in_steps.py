"""torchmetrics inside a compiled step: nothing it does there may look at a value.

Outside of steps (`compute()` at the end of an epoch, `xla_mode="eager"`) everything is torchmetrics' own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torchmetrics import Metric, MetricCollection
from torchmetrics.aggregation import BaseAggregator, MaxMetric, MeanMetric, MinMetric, SumMetric

from xla_adapters import get_backend, in_step
from xla_adapters.patching import replaced
from xla_adapters.transfers import to_host_in_one_transfer, uploading

_VALIDATION = "_tensor_validation"


@contextmanager
def metrics_without_reads() -> Iterator[None]:
    """Lets torchmetrics be traced, until the exit:

    - validation of arguments checks shapes and types in a step, but not values;
    - a NaN in MeanMetric and its kin is left out by arithmetic (and not warned of);
    - states that are reset (between steps) do not share buffers with the defaults;
    - values gathered in a list are not cloned at each step, each time one more;
    - MetricCollection does not compare states to form groups: XLA computes what is equal once.
    """
    with ExitStack() as stack:
        for owner, name, function in _validations():
            stack.enter_context(replaced(owner, name, _validating_shapes(function)))
        stack.enter_context(replaced(BaseAggregator, "_cast_and_nan_check_input", _leaving_nan_out()))
        stack.enter_context(replaced(Metric, "reset", _resetting_to_own_buffers()))
        stack.enter_context(replaced(Metric, "_copy_state_dict", _copying_without_clones()))
        stack.enter_context(replaced(_ResultMetric, "to", _moving_state_only()))
        stack.enter_context(replaced(MetricCollection, "_equal_metric_states", staticmethod(_never_equal_in_steps())))
        yield


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
    """Zeros of the same shape and type on the host: valid labels, and valid probabilities."""
    if isinstance(value, torch.Tensor) and value.device.type == "xla":
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
        # Under "error" a step cannot raise: the NaN shows in the result.
        if self.nan_strategy == "error":
            return x, weight
        return torch.where(nans, neutral, x), torch.where(nans, 0.0, weight)

    return cast


def _neutral(metric: Any) -> float | None:
    """The value that changes nothing; `None` if there is none (a list of values)."""
    if isinstance(metric, MaxMetric):
        return float("-inf")
    if isinstance(metric, MinMetric):
        return float("inf")
    return 0.0 if isinstance(metric, (MeanMetric, SumMetric)) else None


def _resetting_to_own_buffers() -> Callable[[Any], None]:
    """A reset clones the defaults, and on the device a clone is the same buffer, until it is written: it would be
    one input of the first step's graph where later steps have two."""
    stock = Metric.reset
    defaults: dict[int, tuple[Any, dict[str, torch.Tensor]]] = {}

    @functools.wraps(stock)
    def reset(self: Any) -> None:
        if in_step():
            stock(self)
            return
        with uploading():
            stock(self)
        backend = get_backend()
        if id(self) not in defaults:
            tensors = {name: value for name, value in self._defaults.items() if isinstance(value, torch.Tensor)}
            defaults[id(self)] = self, to_host_in_one_transfer(tensors)
        for name, value in defaults[id(self)][1].items():
            if backend.is_backend_tensor(getattr(self, name)):
                setattr(self, name, backend.to_device(value))

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
            # Nothing changes them in place.
            states[name] = list(items)
        return states

    return copied


def _moving_state_only() -> Callable[..., Any]:
    """Logged values are reset inside the first step of an epoch; from host defaults that is an upload, from device
    defaults it would be another graph."""
    stock = _ResultMetric.to

    @functools.wraps(stock)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        defaults = self._defaults
        stock(self, *args, **kwargs)
        self._defaults = defaults
        return self

    return to


def _never_equal_in_steps() -> Callable[..., bool]:
    stock = MetricCollection._equal_metric_states

    @functools.wraps(stock)
    def equal(metric1: Any, metric2: Any) -> bool:
        return not in_step() and bool(stock(metric1, metric2))

    return equal
