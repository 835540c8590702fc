"""`DeferredNumber`: a number that a step computes and a library reads inside it, to log it after the step."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, Protocol

import numpy as np
import torch

from xla_adapters.errors import DiscardedTensorError, FailedCheckError, TensorReadError
from xla_adapters.runtime import Runtime

_Number = int | float | bool | complex
# Of numbers, in a form that outlives them: `("plain", value)`, `("output", position)` of a number that the device
# computes, `("host", position)` of one that is read on the host, or `("call", function, *expressions)`.
Expression = tuple[Any, ...]


class Numbers(Protocol):
    """The numbers that are read in one step: of the device (`DeferredNumbers`), or on the host (`ReadsOnHost`)."""

    kind: str

    @property
    def is_open(self) -> bool:
        """Whether the step has not ended."""

    def value(self, index: int) -> Any:
        """One of the numbers."""

    def decide(self, function: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
        """The result of a function that needs the values of its operands, all of them these numbers or plain ones."""


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
        ends: called before that; ends the step if it may end there, and returns whether it has ended.

    Attributes:
        stacked: one tensor for each dtype, once the step is complete.
        places: for each number which of them has it, and where.
    """

    kind = "output"

    def __init__(
        self, runtime: Runtime, split: Callable[[torch.Tensor], None], ends: Callable[[], bool] = bool
    ) -> None:
        self._runtime = runtime
        self._ends = ends
        self._split: Callable[[torch.Tensor], None] | None = split
        self._phase = _Phase.OPEN
        self._tensors: list[torch.Tensor] = []
        self.stacked: list[torch.Tensor] = []
        self.places: list[tuple[int, int]] = []
        self._values: dict[int, _Number] = {}
        # What a library has checked in the step: the number, what it must be, and the line.
        self._checks: list[tuple[int, bool, str]] = []

    @classmethod
    def of_replay(cls, runtime: Runtime, stacked: list[torch.Tensor], places: list[tuple[int, int]]) -> DeferredNumbers:
        """The numbers of a replayed step.

        Args:
            runtime: the runtime.
            stacked: what brings them to the host; has values when the step has ended.
            places: see `places`.
        """

        def refuse(tensor: torch.Tensor) -> None:
            raise TensorReadError(
                "a number that a replayed step computes is needed before the step has ended. Use it after the step, or "
                "set step_replay=False to have the step traced at each call."
            )

        numbers = cls(runtime, refuse)
        # One that is needed before is not looked up: `refuse` raises.
        numbers._tensors = [stacked[row] for row, _ in places]
        numbers.stacked, numbers.places = stacked, places
        return numbers

    @property
    def is_open(self) -> bool:
        """Whether the step that computes the numbers has not ended."""
        return self._phase is _Phase.OPEN

    def decide(self, function: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
        """See `Numbers`."""
        return function(*map(_plain, operands))

    def read(self, tensor: torch.Tensor) -> DeferredNumber:
        """The number in a tensor of one element, as it is now."""
        with torch.no_grad(), torch._C.DisableTorchFunction():
            # A copy: the step may change the tensor after the read.
            self._tensors.append(tensor.detach().clone().reshape(()))
        return DeferredNumber(self, len(self._tensors) - 1)

    def expect(self, tensor: torch.Tensor, passing: bool, line: str) -> None:
        """A library checks a number that is not known yet: goes on as if the check has passed, and looks at it later.

        Args:
            tensor: of one element.
            passing: what it is if the check passes.
            line: that checks it.
        """
        self.read(tensor)
        self._checks.append((len(self._tensors) - 1, passing, line))

    def before_execution(self) -> None:
        """The step's graph is complete but for the numbers: makes them its outputs."""
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(self._tensors):
            by_dtype.setdefault(tensor.dtype, []).append(index)
        places = {}
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for row, indices in enumerate(by_dtype.values()):
                self.stacked.append(torch.stack([self._tensors[index] for index in indices]))
                places.update({index: (row, column) for column, index in enumerate(indices)})
        self.places = [places[index] for index in range(len(self._tensors))]
        self._tensors = []

    def executed(self) -> None:
        """The step was executed: the numbers travel to the host with the next values that do."""
        self._phase, self._split, self._ends, self._tensors = _Phase.EXECUTED, None, bool, []
        if self.stacked:
            self._runtime.transfers.piggy_back(self.stacked, self._receive, must_arrive=bool(self._checks))

    def discard(self) -> None:
        """The step was discarded: its numbers were never computed."""
        self._phase, self._split, self._ends = _Phase.DISCARDED, None, bool
        self._tensors, self.stacked = [], []

    def _receive(self, copies: list[torch.Tensor]) -> None:
        with torch._C.DisableTorchFunction():
            rows = [copy.tolist() for copy in copies]
        for index, (row, column) in enumerate(self.places):
            self._values.setdefault(index, rows[row][column])
        self._phase, self.stacked = _Phase.KNOWN, []
        for index, passing, line in self._checks:
            if self._values[index] != passing:
                raise FailedCheckError(
                    f"a check of a library has failed in a step that has ended: {line}. The step went on as if it had "
                    "passed, since the device had not computed what is checked. Stock code raises there."
                )

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
            # A reference to the tensor would make it an output of a step that ends here.
            if self.is_open and not self._ends():
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
        source: numbers of the step, or an operation on numbers.
        index: which of them.
    """

    __slots__ = ("_index", "_source", "_value")

    def __init__(self, source: Numbers | _Operation, index: int = 0) -> None:
        self._source: Numbers | _Operation | None = source
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
            elif isinstance(source, _Operation):
                missing = [one for one in source.operands if isinstance(one, DeferredNumber) and one._value is None]
                if missing:
                    waiting.extend(missing)
                else:
                    number._value, number._source = source.function(*map(_plain, source.operands)), None
            else:
                number._value, number._source = source.value(number._index), None
        return self._value

    def is_open(self) -> bool:
        """Whether a step that is still open computes it."""
        return next(self._open_sources(), None) is not None

    def _open_sources(self) -> Iterator[Numbers]:
        """The numbers of open steps that it is computed from, those that came last first; some several times."""
        waiting: list[DeferredNumber] = [self]
        seen: set[int] = set()
        while waiting:
            number = waiting.pop()
            source = number._source
            if isinstance(source, _Operation):
                new = [one for one in source.operands if isinstance(one, DeferredNumber) and id(one) not in seen]
                seen.update(map(id, new))
                waiting.extend(new)
            elif source is not None and source.is_open and number._value is None:
                yield source

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
        is_zero = self._decide(operator.eq, right, 0)
        return function(_plain(left), _plain(right)) if is_zero else self._apply(function, left, right)

    @staticmethod
    def _decide(function: Callable[..., Any], *operands: Any) -> Any:
        """The result of a function that needs values."""
        numbers = [operand for operand in operands if isinstance(operand, DeferredNumber)]
        sources = {id(source): source for number in numbers for source in number._open_sources()}
        if len(sources) == 1:
            return next(iter(sources.values())).decide(function, operands)
        return function(*map(_plain, operands))

    def __pow__(self, other: Any) -> Any:
        # Zero to a negative power must raise here.
        waits = isinstance(other, (int, float)) and other > 0
        return self._apply(operator.pow, self, other) if waits else operator.pow(self.value(), _plain(other))

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
        return bool(self._decide(bool, self))

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.value(), digits)

    def __trunc__(self) -> Any:
        return math.trunc(self.value())

    def __floor__(self) -> Any:
        return math.floor(self.value())

    def __ceil__(self) -> Any:
        return math.ceil(self.value())

    def __eq__(self, other: object) -> Any:
        return self._decide(operator.eq, self, other)

    def __ne__(self, other: object) -> Any:
        return self._decide(operator.ne, self, other)

    def __lt__(self, other: Any) -> Any:
        return self._decide(operator.lt, self, other)

    def __le__(self, other: Any) -> Any:
        return self._decide(operator.le, self, other)

    def __gt__(self, other: Any) -> Any:
        return self._decide(operator.gt, self, other)

    def __ge__(self, other: Any) -> Any:
        return self._decide(operator.ge, self, other)

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


def expression_of(value: Any) -> Expression | None:
    """What a value is computed of, if it is a number of the open step; None if one of an earlier step is in it."""
    if not isinstance(value, DeferredNumber):
        return "plain", value
    source = value._source
    if source is None:
        return "plain", value._value
    if not isinstance(source, _Operation):
        return (source.kind, value._index) if source.is_open else None
    operands = [expression_of(operand) for operand in source.operands]
    return None if None in operands else ("call", source.function, *operands)


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


def known_numbers(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a call that makes a tensor of numbers, with the values of deferred ones."""
    numbers = args[0] if args and type(args[0]) in (list, tuple) else args[:1]
    return tuple(map(_plain, args)) if any(isinstance(one, DeferredNumber) for one in numbers) else args


def _plain(value: Any) -> Any:
    if isinstance(value, DeferredNumber):
        return value.value()
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value
