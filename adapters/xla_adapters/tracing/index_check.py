"""Checks indices that come from the batch or its shapes: devices read another row for one that is out of range.

They say nothing of it. The values of the batch's integers are known on the host (`runtime.transfers`), and so is what
the step computes from them (`HostValues`). While a step is traced, the indices of lookups are compared with the size of
what is looked up. Replays do the same with the values of their own batch (`CheckedIndices`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from xla_adapters.errors import IndexRangeError
from xla_adapters.runtime.transfers import upload_of
from xla_adapters.tracing.host_values import HostValue, HostValues, Known
from xla_adapters.tracing.library_reads import library_reads
from xla_adapters.utils.location import current_location
from xla_adapters.utils.torch_modes import device_type

_Tensor = torch.Tensor
_CALL = Callable[..., Any]
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


@dataclass(frozen=True)
class Bounds:
    """The values that indices may have.

    Attributes:
        low, high: the smallest, and the first that is too large.
        ignored: a further value that is allowed.
    """

    low: int
    high: int
    ignored: int | None = None

    def outlier(self, values: torch.Tensor) -> int | None:
        """A value that is out of bounds; None if there is none."""
        if not values.numel():
            return None
        # NumPy: torch would wake its threads for each of these.
        with torch._C.DisableTorchFunction():
            array = values.numpy()
        if self.low <= array.min() and array.max() < self.high:
            return None
        outside = array[(array < self.low) | (array >= self.high)]
        if self.ignored is not None:
            outside = outside[outside != self.ignored]
        return int(outside.min()) if outside.size else None

    def and_also(self, other: Bounds) -> Bounds:
        """Bounds that hold if both do, of two that allow the same further value."""
        return dataclasses.replace(self, low=max(self.low, other.low), high=min(self.high, other.high))


@dataclass(frozen=True)
class _Checked:
    """One lookup of a traced step.

    Attributes:
        indices: how the host computes them.
        bounds: what they may be.
        values: of what they are computed from, in the traced step.
    """

    indices: HostValue
    bounds: Bounds
    values: Known


# By tensor of a batch: all lookups of the last traced step that looked something up by it.
_checked = WeakTensorKeyDictionary()


def values_on_host(batch: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """The values of those tensors of a batch that the host knows, by their positions."""
    uploads = ((index, upload_of(tensor)) for index, tensor in enumerate(batch))
    return {index: upload.values for index, upload in uploads if upload is not None}


class CheckedIndices:
    """The lookups of a traced step by integers of its batch.

    Args:
        batch: of the traced step.
    """

    def __init__(self, batch: Sequence[torch.Tensor]) -> None:
        with torch._C.DisableTorchFunction():
            found = {id(checked): checked for tensor in batch if (checked := _checked.get(tensor)) is not None}
        self._all = [item for checked in found.values() for item in checked]
        positions = {id(tensor): index for index, tensor in enumerate(batch)}
        # What was uploaded inside the step is the same in each replay.
        self._constants = {source: value for item in self._all for source, value in item.values.items()}
        self._sources: list[tuple[HostValue, int]] = []
        for source in self._constants:
            tensor = source.tensor() if source.tensor is not None else None
            if id(tensor) in positions:
                self._sources.append((source, positions[id(tensor)]))
        of_batch = dict(self._sources)
        self._whole: dict[tuple[int, int | None], Bounds] = {}
        self._exact: list[_Checked] = []
        for item in self._all:
            (source, values), *others = item.values.items()
            if others or source not in of_batch or not item.indices.selects or item.bounds.outlier(values) is not None:
                self._exact.append(item)
                continue
            key = of_batch[source], item.bounds.ignored
            self._whole[key] = item.bounds.and_also(self._whole.get(key, item.bounds))

    def are_in_range(self, values: Mapping[int, torch.Tensor]) -> bool:
        """Whether all indices are in range in a replay.

        Args:
            values: of its batch (`values_on_host`), of which the host knows the same tensors as in the traced step.
        """
        # Mostly, all values of a tensor can be looked up, also those that the step leaves out.
        whole = all(bounds.outlier(values[at]) is None for (at, _), bounds in self._whole.items())
        if whole and not self._exact:
            return True
        known = {**self._constants, **{source: values[at] for source, at in self._sources if at in values}}
        items = self._exact if whole else self._all
        return all(item.bounds.outlier(item.indices.get(known)) is None for item in items)


def _argument(args: Sequence[Any], kwargs: dict[str, Any], position: int, name: str, default: Any = None) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


# Indices, the smallest and the first too large one, and one that is ignored.
_Lookup = tuple[Any, int, int, int | None]


def _embedding(args: Sequence[Any], kwargs: dict[str, Any]) -> list[_Lookup]:
    size = _argument(args, kwargs, 1, "weight").shape[0]
    return [(_argument(args, kwargs, 0, "input"), 0, size, None)]


def _classes(args: Sequence[Any], kwargs: dict[str, Any]) -> list[_Lookup]:
    scores, target = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "target")
    ignored = _argument(args, kwargs, 4, "ignore_index", -100)
    return [(target, 0, scores.shape[1 if scores.ndim > 1 else 0], ignored)]


def _of_margin(args: Sequence[Any], kwargs: dict[str, Any]) -> list[_Lookup]:
    return [(_argument(args, kwargs, 1, "target"), 0, _argument(args, kwargs, 0, "input").shape[-1], None)]


def _along_dimension(args: Sequence[Any], kwargs: dict[str, Any]) -> list[_Lookup]:
    values, dim = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "dim")
    return [(_argument(args, kwargs, 2, "index"), 0, values.shape[dim] if values.ndim else 1, None)]


def _from_the_end_too(args: Sequence[Any], kwargs: dict[str, Any]) -> list[_Lookup]:
    ((index, _, size, _),) = _along_dimension(args, kwargs)
    return [(index, -size, size, None)]


def _take(args: Sequence[Any], kwargs: dict[str, Any]) -> list[_Lookup]:
    size = _argument(args, kwargs, 0, "input").numel()
    return [(_argument(args, kwargs, 1, "index"), -size, size, None)]


def _take_along(args: Sequence[Any], kwargs: dict[str, Any]) -> list[_Lookup]:
    values, dim = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 2, "dim")
    size = values.numel() if dim is None else values.shape[dim]
    return [(_argument(args, kwargs, 1, "indices"), 0, size, None)]


def _item(args: Sequence[Any], kwargs: dict[str, Any]) -> list[_Lookup]:
    """Of an index in brackets: its tensors of integers, up to a part whose dimensions take a closer look."""
    found: list[_Lookup] = []
    dims = args[0].ndim
    for dim, part in enumerate(args[1] if isinstance(args[1], tuple) else (args[1],)):
        if isinstance(part, _Tensor) and part.dtype not in (torch.bool, torch.uint8) and dim < dims:
            found.append((part, -args[0].shape[dim], args[0].shape[dim], None))
        elif type(part) not in (int, slice):
            break
    return found


def _put(args: Sequence[Any], kwargs: dict[str, Any]) -> list[_Lookup]:
    return _item((_argument(args, kwargs, 0, "input"), tuple(_argument(args, kwargs, 1, "indices"))), {})


def _one_hot(args: Sequence[Any], kwargs: dict[str, Any]) -> list[_Lookup]:
    classes = _argument(args, kwargs, 1, "num_classes", -1)
    return [(_argument(args, kwargs, 0, "tensor"), 0, classes, None)] if classes > 0 else []


def _ctc(args: Sequence[Any], kwargs: dict[str, Any]) -> list[_Lookup]:
    scores, targets = _argument(args, kwargs, 0, "log_probs"), _argument(args, kwargs, 1, "targets")
    frames, labels = _argument(args, kwargs, 2, "input_lengths"), _argument(args, kwargs, 3, "target_lengths")
    longest = targets.shape[-1] if targets.ndim > 1 else targets.numel()
    return [(frames, 0, scores.shape[0] + 1, None), (labels, 0, longest + 1, None)]


def _of_tensors(*names: str) -> tuple[_CALL, ...]:
    """Methods of tensors, and the functions of torch of these names."""
    return tuple(getattr(owner, name) for owner in (_Tensor, torch) for name in names if hasattr(owner, name))


# What is looked up, by function.
LOOKUPS: dict[_CALL, Callable[[Sequence[Any], dict[str, Any]], list[_Lookup]]] = {
    functional.embedding: _embedding,
    functional.embedding_bag: _embedding,
    functional.cross_entropy: _classes,
    functional.nll_loss: _classes,
    functional.multi_margin_loss: _of_margin,
    **dict.fromkeys(
        _of_tensors(
            *("gather", "index_select", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce"),
            *("scatter_reduce_", "index_add", "index_add_", "index_copy", "index_copy_"),
        ),
        _along_dimension,
    ),
    **dict.fromkeys(_of_tensors("index_fill", "index_fill_"), _from_the_end_too),
    **dict.fromkeys(_of_tensors("index_put", "index_put_"), _put),
    **dict.fromkeys(_of_tensors("take"), _take),
    **dict.fromkeys(_of_tensors("take_along_dim"), _take_along),
    _Tensor.__getitem__: _item,
    _Tensor.__setitem__: _item,
    functional.one_hot: _one_hot,
    functional.ctc_loss: _ctc,
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
        self._checked: list[_Checked] = []

    def note(self, function: _CALL, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """A function was called in the step."""
        if self._notes:
            self._values.note(function, args, kwargs, result)

    def written(self, function: _CALL, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[Any], None] | None:
        """A function is about to write to its first argument; what to call then. See `HostValues.written`."""
        return self._values.written(function, args, kwargs)

    def check(self, function: _CALL, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """A function is about to be called in the step.

        Raises:
            IndexRangeError: it looks up an index that is out of range, and comes from the batch or its shapes.
        """
        lookup = LOOKUPS.get(function)
        if lookup is not None:
            # A transform would wrap what the host computes.
            with temporarily_clear_interpreter_stack():
                for found in lookup(args, kwargs):
                    self._compare(function, found)

    def _compare(self, function: _CALL, lookup: _Lookup) -> None:
        indices, low, high, ignored = lookup
        if not isinstance(indices, _Tensor) or indices.dtype not in _INTEGERS or indices.device.type != device_type():
            return
        values = self._values.get(indices)
        found = self._values.find(indices)
        if values is None or found is None:
            return
        bounds = Bounds(low, high, ignored)
        outlier = bounds.outlier(values)
        if outlier is not None:
            raise _error(getattr(function, "__name__", str(function)), outlier, bounds, found)
        # What only shapes determine is the same in each replay.
        if not found.sources:
            return
        self._checked.append(_Checked(found, bounds, {source: self._values.copied(source) for source in found.sources}))
        with torch._C.DisableTorchFunction():
            for source in found.sources:
                tensor = source.tensor() if source.tensor is not None else None
                if tensor is not None:
                    _checked[tensor] = self._checked


def _error(name: str, value: int, bounds: Bounds, indices: HostValue) -> IndexRangeError:
    source = indices.only_source()
    where = f"an index that is computed from {'the batch' if indices.sources else 'shapes, such as a position,'}"
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
