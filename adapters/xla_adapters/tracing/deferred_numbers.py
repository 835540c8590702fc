"""`DeferredNumber`: a number that a step computes and a library reads inside it, to log it after the step."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import torch

from xla_adapters.errors import DiscardedTensorError
from xla_adapters.runtime import Runtime

_Number = int | float | bool | complex


class _Phase(Enum):
    OPEN = "the step is open"
    EXECUTED = "the values are on the device"
    KNOWN = "the values are on the host"
    DISCARDED = "the step was discarded"


class DeferredNumbers:
    """The numbers that were read in one step, for after the step. They come to the host in one transfer.

    Args:
        runtime: the runtime.
        split: called if a number is needed inside the step; executes what the step has traced so far.
    """

    def __init__(self, runtime: Runtime, split: Callable[[torch.Tensor], None]) -> None:
        self._runtime = runtime
        self._split: Callable[[torch.Tensor], None] | None = split
        self._phase = _Phase.OPEN
        self._tensors: list[torch.Tensor] = []
        # One tensor for each dtype, and for each number which of them has it, and where.
        self._stacked: list[torch.Tensor] = []
        self._places: list[tuple[int, int]] = []
        self._values: dict[int, _Number] = {}

    @property
    def is_open(self) -> bool:
        """Whether the step that computes the numbers has not ended."""
        return self._phase is _Phase.OPEN

    def read(self, tensor: torch.Tensor) -> DeferredNumber:
        """The number in a tensor of one element, as it is now."""
        with torch.no_grad(), torch._C.DisableTorchFunction():
            # A copy: the step may change the tensor after the read.
            self._tensors.append(tensor.detach().clone().reshape(()))
        return DeferredNumber(self, len(self._tensors) - 1)

    def before_execution(self) -> None:
        """The step's graph is complete but for the numbers: makes them its outputs."""
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(self._tensors):
            by_dtype.setdefault(tensor.dtype, []).append(index)
        places = {}
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for row, indices in enumerate(by_dtype.values()):
                self._stacked.append(torch.stack([self._tensors[index] for index in indices]))
                places.update({index: (row, column) for column, index in enumerate(indices)})
        self._places = [places[index] for index in range(len(self._tensors))]
        self._tensors = []

    def executed(self) -> None:
        """The step was executed: the numbers travel to the host with the next values that do."""
        self._phase, self._split = _Phase.EXECUTED, None
        if self._stacked:
            self._runtime.transfers.piggy_back(self._stacked, self._receive)

    def discard(self) -> None:
        """The step was discarded: its numbers were never computed."""
        self._phase, self._split = _Phase.DISCARDED, None
        self._tensors, self._stacked = [], []

    def _receive(self, copies: list[torch.Tensor]) -> None:
        with torch._C.DisableTorchFunction():
            rows = [copy.tolist() for copy in copies]
        for index, (row, column) in enumerate(self._places):
            self._values.setdefault(index, rows[row][column])
        self._phase, self._stacked = _Phase.KNOWN, []

    def value(self, index: int) -> _Number:
        """One of the numbers.

        Raises:
            DiscardedTensorError: the step that would have computed it was discarded.
        """
        if index not in self._values:
            if self._phase is _Phase.DISCARDED:
                raise DiscardedTensorError(
                    "this number was read in a step that was discarded (an exception, or Ctrl-C, ended it early), so "
                    "it has no value. Use what a step computes only after the step has ended normally."
                )
            if self._phase is _Phase.OPEN:
                assert self._split is not None
                self._split(self._tensors[index])
                with torch._C.DisableTorchFunction():
                    self._values[index] = self._tensors[index].item()
            else:
                self._runtime.transfers.deliver_piggy_backed()
        return self._values[index]


class _Operation:
    """What is to be done with numbers that are not known yet.

    Args:
        function: the operation.
        operands: deferred numbers and plain ones.
    """

    __slots__ = ("function", "operands")

    def __init__(self, function: Callable[..., Any], operands: tuple[Any, ...]) -> None:
        self.function = function
        self.operands = operands


class DeferredNumber:
    """A number that is known after the step, in place of the result of `tensor.item()`.

    After the step it behaves as the number, and arithmetic with it gives plain numbers. Inside the step arithmetic
    gives another deferred number; any other use (a comparison, `float()`, formatting) needs the value, so that the step
    is executed in two parts, which is told once. It is no `float` for C code: `json.dumps` refuses it, rather than
    writing a wrong number.

    Args:
        source: the numbers of the step, or an operation on numbers.
        index: which of them.
    """

    __slots__ = ("_index", "_source", "_value")

    def __init__(self, source: DeferredNumbers | _Operation, index: int = 0) -> None:
        self._source: DeferredNumbers | _Operation | None = source
        self._index = index
        self._value: _Number | None = None

    def value(self) -> Any:
        """The number.

        Raises:
            DiscardedTensorError: the step that would have computed it was discarded.
        """
        # Not by recursion: a running total is a chain as long as the run.
        waiting = [self]
        while waiting:
            number = waiting[-1]
            source = number._source
            if number._value is not None or source is None:
                waiting.pop()
            elif isinstance(source, DeferredNumbers):
                number._value, number._source = source.value(number._index), None
            else:
                missing = [one for one in source.operands if isinstance(one, DeferredNumber) and one._value is None]
                if missing:
                    waiting.extend(missing)
                else:
                    number._value, number._source = source.function(*map(_plain, source.operands)), None
        return self._value

    def is_open(self) -> bool:
        """Whether a step that is still open computes it."""
        waiting: list[DeferredNumber] = [self]
        seen: set[int] = set()
        while waiting:
            number = waiting.pop()
            source = number._source
            if isinstance(source, DeferredNumbers):
                if source.is_open and number._value is None:
                    return True
            elif source is not None:
                new = [one for one in source.operands if isinstance(one, DeferredNumber) and id(one) not in seen]
                seen.update(map(id, new))
                waiting.extend(new)
        return False

    # ---- arithmetic ------------------------------------------------------------------------------

    @staticmethod
    def _apply(function: Callable[..., Any], *operands: Any) -> Any:
        if not all(isinstance(one, (DeferredNumber, int, float, complex, np.number)) for one in operands):
            return NotImplemented
        if any(isinstance(one, DeferredNumber) and one.is_open() for one in operands):
            return DeferredNumber(_Operation(function, operands))
        return function(*map(_plain, operands))

    def __add__(self, other: Any) -> Any:
        return self._apply(operator.add, self, other)

    def __radd__(self, other: Any) -> Any:
        return self._apply(operator.add, other, self)

    def __sub__(self, other: Any) -> Any:
        return self._apply(operator.sub, self, other)

    def __rsub__(self, other: Any) -> Any:
        return self._apply(operator.sub, other, self)

    def __mul__(self, other: Any) -> Any:
        return self._apply(operator.mul, self, other)

    def __rmul__(self, other: Any) -> Any:
        return self._apply(operator.mul, other, self)

    def __truediv__(self, other: Any) -> Any:
        return self._divide(operator.truediv, self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._divide(operator.truediv, other, self)

    def __floordiv__(self, other: Any) -> Any:
        return self._divide(operator.floordiv, self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return self._divide(operator.floordiv, other, self)

    def __mod__(self, other: Any) -> Any:
        return self._divide(operator.mod, self, other)

    def __rmod__(self, other: Any) -> Any:
        return self._divide(operator.mod, other, self)

    def _divide(self, function: Callable[..., Any], left: Any, right: Any) -> Any:
        # A division by zero must raise here and not when the result is looked at.
        if isinstance(right, DeferredNumber):
            right = right.value()
        return function(_plain(left), right) if right == 0 else self._apply(function, left, right)

    def __pow__(self, other: Any) -> Any:
        return operator.pow(self.value(), _plain(other))

    def __rpow__(self, other: Any) -> Any:
        return operator.pow(other, self.value())

    def __neg__(self) -> Any:
        return self._apply(operator.neg, self)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return self._apply(operator.abs, self)

    # ---- uses that need the value ----------------------------------------------------------------

    def __float__(self) -> float:
        return float(self.value())

    def __int__(self) -> int:
        return int(self.value())

    def __index__(self) -> int:
        return operator.index(self.value())

    def __complex__(self) -> complex:
        return complex(self.value())

    def __bool__(self) -> bool:
        return bool(self.value())

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.value(), digits)

    def __trunc__(self) -> Any:
        return math.trunc(self.value())

    def __floor__(self) -> Any:
        return math.floor(self.value())

    def __ceil__(self) -> Any:
        return math.ceil(self.value())

    def __eq__(self, other: object) -> Any:
        return self.value() == _plain(other)

    def __ne__(self, other: object) -> Any:
        return self.value() != _plain(other)

    def __lt__(self, other: Any) -> Any:
        return self.value() < _plain(other)

    def __le__(self, other: Any) -> Any:
        return self.value() <= _plain(other)

    def __gt__(self, other: Any) -> Any:
        return self.value() > _plain(other)

    def __ge__(self, other: Any) -> Any:
        return self.value() >= _plain(other)

    def __hash__(self) -> int:
        return hash(self.value())

    def __repr__(self) -> str:
        return repr(self.value())

    def __str__(self) -> str:
        return str(self.value())

    def __format__(self, spec: str) -> str:
        return format(self.value(), spec)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.asarray(self.value(), dtype=dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        value = self.value()
        return type(value), (value,)

    def __getattr__(self, name: str) -> Any:
        # The methods of a plain number: `is_integer`, `real`, `bit_length`.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.value(), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return function(*map(_plain, args), **{name: _plain(value) for name, value in (kwargs or {}).items()})


def make_plain(kept: Any) -> Any:
    """Replaces deferred numbers whose step has ended, in lists and dictionaries, by the numbers.

    Args:
        kept: a value; its lists and dictionaries are changed in place.

    Returns:
        The value, or the number.
    """
    if isinstance(kept, DeferredNumber):
        return kept if kept.is_open() else kept.value()
    if isinstance(kept, (dict, list)):
        for place, value in list(kept.items() if isinstance(kept, dict) else enumerate(kept)):
            if isinstance(value, (DeferredNumber, dict, list)):
                kept[place] = make_plain(value)
    return kept


def _plain(value: Any) -> Any:
    if isinstance(value, DeferredNumber):
        return value.value()
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value
