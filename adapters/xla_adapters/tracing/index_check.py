"""Checks indices that come from the batch: devices read another row for one that is out of range, and say nothing.

The values of the batch's integers are known on the host (`runtime.transfers`), and so is what the step computes from
them (`HostValues`). While a step is traced, the indices of lookups are compared with the size of what is looked up. A
traced step also says what values each integer tensor of a batch may have, so that replays can compare the tensor
itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from xla_adapters.errors import IndexRangeError
from xla_adapters.runtime.transfers import upload_of
from xla_adapters.tracing.host_values import HostValues
from xla_adapters.tracing.library_reads import library_reads
from xla_adapters.utils.location import current_location
from xla_adapters.utils.torch_modes import device_type

_Tensor = torch.Tensor
_CALL = Callable[..., Any]
# A tensor with more values out of bounds is not compared in replays.
_MOST_SHOWN = 16
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


@dataclass(frozen=True)
class Bounds:
    """The values that indices may have.

    Attributes:
        low, high: the smallest, and the first that is too large.
        ignored: a further value that is allowed.
        shown: values out of bounds that a traced step has not looked up (padding that a mask removes, say).
    """

    low: int
    high: int
    ignored: int | None = None
    shown: frozenset[int] = frozenset()

    def outlier(self, values: torch.Tensor) -> int | None:
        """A value that is out of bounds; None if there is none."""
        return next(iter(self._outliers(values)), None)

    def widened(self, values: torch.Tensor) -> Bounds | None:
        """The bounds with what these values show; None if too many values would be allowed."""
        shown = self.shown.union(self._outliers(values))
        return dataclasses.replace(self, shown=shown) if len(shown) <= _MOST_SHOWN else None

    def _outliers(self, values: torch.Tensor) -> Sequence[int]:
        if not values.numel():
            return ()
        # NumPy: torch would wake its threads for each of these.
        with torch._C.DisableTorchFunction():
            array = values.numpy()
        if self.low <= array.min() and array.max() < self.high:
            return ()
        outside = array[(array < self.low) | (array >= self.high)]
        if self.ignored is not None:
            outside = outside[outside != self.ignored]
        return [value for value in numpy.unique(outside).tolist() if value not in self.shown]

    def and_also(self, other: Bounds | None) -> Bounds | None:
        """Bounds that hold if both do; None if they allow different further values."""
        if other is None:
            return self
        if other.ignored != self.ignored:
            return None
        return Bounds(max(self.low, other.low), min(self.high, other.high), self.ignored)


# The bounds of tensors of the batch that is being traced.
_bounds = WeakTensorKeyDictionary()


def bounds_of(batch: Sequence[torch.Tensor]) -> dict[int, Bounds]:
    """What the last traced step that used these tensors compares them with, by their position."""
    with torch._C.DisableTorchFunction():
        found = {index: _bounds.get(tensor) for index, tensor in enumerate(batch)}
    return {index: bounds for index, bounds in found.items() if bounds is not None}


def violated(batch: Sequence[torch.Tensor], bounds: dict[int, Bounds]) -> int | None:
    """The position of a tensor whose values are out of bounds; None if there is none that the host knows of."""
    for index, allowed in bounds.items():
        upload = upload_of(batch[index])
        if upload is not None and allowed.outlier(upload.values) is not None:
            return index
    return None


def _argument(args: Sequence[Any], kwargs: dict[str, Any], position: int, name: str, default: Any = None) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


_Lookup = tuple[Any, int, int, int | None]


def _embedding(args: Sequence[Any], kwargs: dict[str, Any]) -> _Lookup:
    size = _argument(args, kwargs, 1, "weight").shape[0]
    return _argument(args, kwargs, 0, "input"), 0, size, None


def _classes(args: Sequence[Any], kwargs: dict[str, Any]) -> _Lookup:
    scores, target = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "target")
    ignored = _argument(args, kwargs, 4, "ignore_index", -100)
    return target, 0, scores.shape[1 if scores.ndim > 1 else 0], ignored


def _along_dimension(args: Sequence[Any], kwargs: dict[str, Any]) -> _Lookup:
    values, dim = args[0], _argument(args, kwargs, 1, "dim")
    return _argument(args, kwargs, 2, "index"), 0, values.shape[dim] if values.ndim else 1, None


def _item(args: Sequence[Any], kwargs: dict[str, Any]) -> _Lookup:
    size = args[0].shape[0] if args[0].ndim else 0
    index = args[1] if isinstance(args[1], _Tensor) and args[1].dtype is not torch.uint8 else None
    return index, -size, size, None


def _one_hot(args: Sequence[Any], kwargs: dict[str, Any]) -> _Lookup:
    classes = _argument(args, kwargs, 1, "num_classes", -1)
    return (args[0] if classes > 0 else None), 0, classes, None


# By function: the indices, the smallest and the first too large one, and one that is ignored.
LOOKUPS: dict[_CALL, Callable[[Sequence[Any], dict[str, Any]], _Lookup]] = {
    functional.embedding: _embedding,
    functional.cross_entropy: _classes,
    functional.nll_loss: _classes,
    torch.gather: _along_dimension,
    _Tensor.gather: _along_dimension,
    torch.index_select: _along_dimension,
    _Tensor.index_select: _along_dimension,
    _Tensor.__getitem__: _item,
    functional.one_hot: _one_hot,
}


class IndexCheck:
    """Compares the indices in one traced step with what they look up.

    Args:
        notes: whether to follow the batch's integers through the step; False if something else does.
    """

    def __init__(self, notes: bool) -> None:
        reads = library_reads()
        self._values = HostValues() if reads is None else reads.host_values
        self._notes = notes

    def note(self, function: _CALL, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """A function was called in the step."""
        if self._notes:
            self._values.note(function, args, kwargs, result)

    def check(self, function: _CALL, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """A function is about to be called in the step.

        Raises:
            IndexRangeError: it looks up an index from the batch that is out of range.
        """
        lookup = LOOKUPS.get(function)
        if lookup is None:
            return
        indices, low, high, ignored = lookup(args, kwargs)
        if not isinstance(indices, _Tensor) or indices.dtype not in _INTEGERS or indices.device.type != device_type():
            return
        values = self._values.get(indices)
        if values is None:
            return
        bounds = Bounds(low, high, ignored)
        source = self._values.source(indices)
        outlier = bounds.outlier(values)
        if outlier is not None:
            raise _error(getattr(function, "__name__", str(function)), outlier, bounds, source)
        if source is not None:
            self._remember(source, bounds)

    def _remember(self, source: torch.Tensor, bounds: Bounds) -> None:
        upload = upload_of(source)
        if upload is None:
            return
        with torch._C.DisableTorchFunction():
            both = bounds.and_also(_bounds.get(source))
            if both is not None and both.outlier(upload.values) is None:
                _bounds[source] = both


def _error(name: str, value: int, bounds: Bounds, source: torch.Tensor | None) -> IndexRangeError:
    where = "an index that is computed from the batch"
    upload = None if source is None else upload_of(source)
    if source is not None and upload is not None:
        entry = upload.name(source) or "a tensor of the batch"
        with torch.no_grad(), torch._C.DisableTorchFunction():
            found = (upload.values == value).nonzero()
        where = f"{entry}{found[0].tolist()}" if len(found) else f"an index that is computed from {entry}"
    place = current_location()
    allowed = f"{bounds.low} to {bounds.high - 1}"
    if bounds.ignored is not None:
        allowed += f", or {bounds.ignored}"
    return IndexRangeError(
        f"{where} is {value}, and {name} takes {allowed} here. The device would read another row and say nothing"
        + (f"\n  at {place}" if place is not None else "")
    )
