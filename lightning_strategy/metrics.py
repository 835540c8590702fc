"""Logged values and torchmetrics in compiled steps: deferred where they read values, restored after a discard."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning_utilities.core.apply_func import apply_to_collection
from torchmetrics import Metric
from torchmetrics.utilities.data import _squeeze_if_scalar

import xla_adapters
from lightning_strategy.metric_patches import MetricReader, metrics_without_reads, reading_logged_metrics
from xla_adapters import in_step
from xla_adapters.errors import GraphBreakError
from xla_adapters.insight.times import WallClock
from xla_adapters.utils.patching import replaced


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


# The connector's values for the progress bar, loggers and callbacks.
_CONNECTOR_VALUES = ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics")


class BatchValue:
    """A metric's value for one batch that is not known before the step is executed.

    `forward` of a metric returns it. Inside the step every use of it raises; after the step it behaves as the value.

    Args:
        metric: whose value it is.
        error: what a use inside the step raises.
        compute: computes the value after the step; None if `set` is going to be called.
    """

    def __init__(self, metric: Metric, error: GraphBreakError, compute: Callable[[], Any] | None = None) -> None:
        self._metric_name = type(metric).__name__
        self._error = error
        self._compute = compute
        self._value: Any = None

    def set(self, value: Any) -> None:
        """Sets the value."""
        self._value = value

    def value(self) -> Any:
        """The value.

        Raises:
            GraphBreakError: the step is not executed yet.
        """
        if self._value is None:
            if in_step() or self._compute is None:
                raise self._error
            self._value = self._compute()
        return self._value

    def __repr__(self) -> str:
        return (
            f"<the value of {self._metric_name} for this batch, which is known only behind the step: log the metric "
            "itself, or use the value in on_..._batch_end>"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.value(), name)

    def __float__(self) -> float:
        return float(self.value())

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = apply_to_collection((args, kwargs or {}), BatchValue, BatchValue.value)
        return function(*args, **kwargs)


class DeferredMetrics:
    """Defers what metrics do in a step and cannot be traced.

    `forward` of a metric computes the value of the batch, wanted or not: if that cannot be traced, it is computed on
    first use. An update that cannot be traced runs after the step, operation by operation. Each method of a metric is
    tried once, in a nested step that is discarded if it fails.
    """

    def __init__(self) -> None:
        # By id and method. The metric is kept, too, so that no other one gets its id.
        self._traceable: dict[tuple[int, str], Metric] = {}
        self._untraceable: dict[tuple[int, str], tuple[Metric, GraphBreakError]] = {}
        self._within_forward: list[Metric] = []
        self._waiting: list[tuple[Callable[[], Any], BatchValue]] = []

    @contextmanager
    def of(self, module: LightningModule) -> Iterator[None]:
        """Until the exit, the methods of the module's metrics are deferred where necessary."""
        with ExitStack() as stack:
            stack.enter_context(replaced(Metric, "__call__", self._calling(Metric.__call__)))
            for metric in [part for part in module.modules() if isinstance(part, Metric)]:
                stack.callback(setattr, metric, "update", metric.update)
                metric.update = self._updating(metric, metric.update)  # type: ignore[method-assign]
            cache = staticmethod(_known_behind_steps(_ResultCollection._get_cache))
            stack.enter_context(replaced(_ResultCollection, "_get_cache", cache))
            yield

    def waiting(self) -> int:
        """How many updates are deferred to the end of the step."""
        return len(self._waiting)

    def after_step(self) -> None:
        """Runs the deferred updates: the step was executed."""
        waiting, self._waiting = self._waiting, []
        for call, result in waiting:
            result.set(call())

    def discard(self) -> None:
        """Drops the deferred updates: the step was discarded."""
        self._waiting.clear()

    def _calling(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def call(metric: Metric, *args: Any, **kwargs: Any) -> Any:
            forward = functools.partial(stock, metric)
            if not in_step():
                return forward(*args, **kwargs)
            self._within_forward.append(metric)
            try:
                with self._lazy_batch_value(metric):
                    error, result = self._attempt(metric, "forward", functools.partial(forward, *args, **kwargs))
            finally:
                self._within_forward.pop()
            return result if error is None else self._later(metric, error, forward, args, kwargs)

        return call

    def _updating(self, metric: Metric, stock: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(stock)
        def update(*args: Any, **kwargs: Any) -> None:
            if not in_step():
                stock(*args, **kwargs)
                return
            error, _ = self._attempt(metric, "update", functools.partial(stock, *args, **kwargs))
            if error is None:
                return
            if any(metric is outer for outer in self._within_forward):
                # The caller is `forward`, which is deferred as a whole.
                raise error
            self._later(metric, error, stock, args, kwargs)

        return update

    def _attempt(self, metric: Metric, name: str, method: Callable[[], Any]) -> tuple[GraphBreakError | None, Any]:
        """Traces a method: (None, its result), or (the error, None) after its effects were undone."""
        key = (id(metric), name)
        if key in self._untraceable:
            return self._untraceable[key][1], None
        if key in self._traceable:
            return None, method()
        kept, waiting = MetricSnapshot(_parts(metric)), len(self._waiting)
        try:
            with xla_adapters.step(name=type(metric).__name__):
                result = method()
        except GraphBreakError as error:
            kept.restore()
            del self._waiting[waiting:]
            # The traceback refers to the tensors that were traced, which would become outputs of the graph.
            self._untraceable[key] = metric, error.with_traceback(None)
            if name == "update":
                warnings.warn(
                    f"{type(metric).__name__}: its update looks at values, so it is no part of the compiled step but "
                    f"runs behind it, operation by operation. ({str(error).splitlines()[0]})",
                    stacklevel=2,
                )
            return error, None
        self._traceable[key] = metric
        return None, result

    def _later(
        self, metric: Metric, error: GraphBreakError, method: Callable[..., Any], args: Any, kwargs: Any
    ) -> BatchValue:
        args, kwargs = apply_to_collection((args, kwargs), torch.Tensor, lambda tensor: tensor.detach().clone())
        result: Any = BatchValue(metric, error)
        metric._forward_cache = result
        self._waiting.append((functools.partial(method, *args, **kwargs), result))
        return result  # type: ignore[no-any-return]

    @contextmanager
    def _lazy_batch_value(self, metric: Metric) -> Iterator[None]:
        stock = metric.compute

        def compute() -> Any:
            error, value = self._attempt(metric, "compute", stock)
            if error is None:
                return value
            if len(_parts(metric)) > 1:
                # It consists of several metrics, whose states change before the value is used: defer all of `forward`.
                raise error
            state = {name: list(value) if isinstance(value, list) else value for name, value in vars(metric).items()}
            return BatchValue(metric, error, functools.partial(_computed, type(metric), state))

        metric.compute = compute  # type: ignore[method-assign]
        try:
            yield
        finally:
            metric.compute = stock  # type: ignore[method-assign]


def _computed(kind: type[Metric], state: dict[str, Any]) -> Any:
    """The value that a metric of this class computes from these attributes."""
    then = kind.__new__(kind)
    vars(then).update(state)
    return _squeeze_if_scalar(kind.compute(then))


def _known_behind_steps(stock: Callable[[Any, bool], Any]) -> Callable[[Any, bool], Any]:
    @functools.wraps(stock)
    def cache(result_metric: Any, on_step: bool) -> Any:
        if on_step and result_metric.meta.on_step:
            if isinstance(result_metric._forward_cache, BatchValue):
                result_metric._forward_cache = result_metric._forward_cache.value()
            value = result_metric._forward_cache
            # Lightning would detach it. That is an operation, before which steps that wait to be executed together
            # are executed.
            if isinstance(value, torch.Tensor) and not value.requires_grad:
                return value
        return stock(result_metric, on_step)

    return cache


def _parts(metric: Metric) -> list[Metric]:
    return [part for part in metric.modules() if isinstance(part, Metric)]


class RunMetrics:
    """Lets `self.log` and torchmetrics work in the compiled steps of one run.

    Args:
        trainer: runs the loops.
        is_step_open: whether a step is being traced now.
        clock: told that results of steps are waited for.

    Attributes:
        deferred: updates of metrics that cannot be traced.
    """

    def __init__(self, trainer: Trainer, is_step_open: Callable[[], bool], clock: WallClock) -> None:
        self._trainer = trainer
        self._reader = MetricReader(is_step_open, clock)
        self.deferred = DeferredMetrics()
        self._metrics: list[Metric] | None = None
        # What a step that is discarded is undone with.
        self._results: Any = None
        self._logged: dict[str, Any] = {}
        self._connector_values: list[dict[str, Any]] = []
        self._snapshot = MetricSnapshot([])

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Patches how Lightning reads logged values and what torchmetrics does in steps, until the exit."""
        with reading_logged_metrics(self._reader), metrics_without_reads():
            yield

    def take_snapshots_of(self, module: LightningModule) -> None:
        """From the next step on the module's metrics are restored if a step is discarded."""
        self._metrics = [part for part in module.modules() if isinstance(part, Metric)]

    def make_progress_bar_values_numbers(self) -> None:
        """Reads what the progress bar showed last, so that nothing of it needs the device any more."""
        connector = self._trainer._logger_connector
        connector._progress_bar_metrics = self._reader.scalars(connector._progress_bar_metrics)

    # ---- events of the steps -------------------------------------------------------------------

    def before_step(self) -> None:
        """A step is about to be opened: takes a snapshot of logged values and metrics."""
        self._reader.forget()
        if self._metrics is not None:
            connector = self._trainer._logger_connector
            self._results = self._trainer._results
            self._connector_values = [dict(getattr(connector, name)) for name in _CONNECTOR_VALUES]
            self._logged = dict(self._results) if self._results is not None else {}
            self._snapshot = MetricSnapshot([*self._metrics, *self._logged.values()])

    def after_discard(self) -> None:
        """A step was discarded: goes back to the snapshot."""
        self.deferred.discard()
        if self._metrics is not None:
            for name, values in zip(_CONNECTOR_VALUES, self._connector_values, strict=True):
                setattr(self._trainer._logger_connector, name, values)
            if self._results is not None:
                self._results.clear()
                self._results.update(self._logged)
            self._snapshot.restore()
