"""`TraceNumbers`: Python numbers that are arguments of a program, not constants in it. `Lifting`: those of updates.

A learning rate that is a constant would cost a compile for each of its values, and a replay would not follow the
schedule. `Lifting` covers the operators that `OperatorRecorder` knows: sums, products, quotients, and their
combinations. A number with another use (an exponent, a clamp) stays a constant.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from typing import Any

import torch

from xla_adapters.runtime import Runtime

# Numbers of one argument: they are uploaded together.
_CHUNK = 64
_TERMS = ("add", "sub", "mul", "div", "true_divide", "truediv")
_COMBINED = ("addcmul", "addcdiv", "lerp")
# The names of the operators of which numbers are lifted, with the name of what they compute.
LIFTED: dict[str, str] = {
    **{f"{name}{suffix}": name for name in (*_TERMS, *_COMBINED) for suffix in ("", "_")},
    **{f"__{prefix}{name}__": name for name in _TERMS for prefix in ("", "r", "i")},
}


class TraceNumbers:
    """Numbers that may differ in the next call, packed into few arguments.

    Args:
        runtime: the runtime.

    Attributes:
        values: in the order in which they were added.
        chunks: for each argument, how many numbers it holds, and its dtype.
        stand_ins: the arguments that hold them.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.values: list[float] = []
        self.chunks: list[tuple[int, torch.dtype]] = []
        self.stand_ins: list[torch.Tensor] = []
        self._entries: list[torch.Tensor] = []

    def add(self, value: float, dtype: torch.dtype) -> torch.Tensor:
        """A number as a tensor of no dimension; called in a trace."""
        count, of_last = self.chunks[-1] if self.chunks else (_CHUNK, dtype)
        if count == _CHUNK or of_last != dtype:
            count = 0
            stand_in = self._runtime.placeholders.stand_in(torch.empty(_CHUNK, dtype=dtype))
            self.stand_ins.append(stand_in)
            self.chunks.append((0, dtype))
            self._entries = list(stand_in.clone().unbind(0))
        self.chunks[-1] = count + 1, dtype
        self.values.append(value)
        return self._entries[count]

    def uploads(self) -> list[torch.Tensor]:
        """The values of the arguments."""
        return uploaded_numbers(self.values, self.chunks, self._runtime)


def uploaded_numbers(
    values: list[float], chunks: Sequence[tuple[int, torch.dtype]], runtime: Runtime
) -> list[torch.Tensor]:
    """The arguments for these numbers: one transfer for each of `TraceNumbers.chunks`."""
    found, begin = [], 0
    for count, dtype in chunks:
        host = torch.tensor(values[begin : begin + count] + [0.0] * (_CHUNK - count), dtype=dtype)
        found.append(runtime.transfers.to_device(host))
        begin += count
    return found


class Lifting:
    """Gives the numbers of one update arguments of the program.

    Args:
        numbers: gets the arguments.
        roles: for each number of the update in its order, what it is and its value: numbers of one role share an
            argument. None if that is not known; then each number is an argument of its own.

    Attributes:
        reason: why the roles are not those of the update, in words; None if they are, so far.
        arguments: the position in `numbers` of each role.
        fixed: the roles that are constants of the program.
    """

    def __init__(self, numbers: TraceNumbers, roles: Sequence[tuple[int, float]] | None) -> None:
        self._numbers = numbers
        self._roles: Iterator[tuple[int, float]] | None = None if roles is None else iter(roles)
        self._entries: dict[int, torch.Tensor] = {}
        # Roles of numbers of which nothing is known. Those of an update are fewer.
        self._unknown = itertools.count(1 << 32)
        self.reason: str | None = None
        self.arguments: dict[int, int] = {}
        self.fixed: set[int] = set()

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls an operator of the update, with arguments of the program in place of its numbers."""
        name = LIFTED.get(getattr(func, "__name__", ""))
        if name is None:
            return func(*args, **kwargs)
        scale = kwargs.get("alpha", kwargs.get("value"))
        if isinstance(scale, torch.Tensor) and not _is_number(scale):
            # Of a learning rate on the device, say. torch would read it.
            return _scaled(func, name, list(args), scale)
        given = [index for index, value in enumerate(args) if _is_number(value)]
        named = [key for key, value in kwargs.items() if _is_number(value)]
        roles = [self._next(float(value)) for value in (*(args[i] for i in given), *(kwargs[k] for k in named))]
        first = args[0] if args else None
        if not roles or not isinstance(first, torch.Tensor):
            self.fixed.update(role for role, _ in roles)
            return func(*args, **kwargs)
        # As precise as what it is used with.
        dtype = torch.float64 if first.dtype == torch.float64 else torch.get_default_dtype()
        entries = [self._entry(*role, dtype) for role in roles]
        values = list(args)
        for index, entry in zip(given, entries, strict=False):
            values[index] = entry
        scale = entries[-1] if named in (["alpha"], ["value"]) else None
        if named and scale is None:
            self.fixed.update(role for role, _ in roles)
            return func(*args, **kwargs)
        return _scaled(func, name, values, scale) if scale is not None else func(*values, **kwargs)

    def _next(self, value: float) -> tuple[int, float]:
        if self._roles is None:
            return next(self._unknown), value
        role = next(self._roles, None)
        if role is None or role[1] != value:
            self.reason = "its update uses other numbers than on stand-ins"
            self._roles = None
            return next(self._unknown), value
        return role

    def _entry(self, role: int, value: float, dtype: torch.dtype) -> torch.Tensor:
        if role not in self._entries:
            self.arguments[role] = len(self._numbers.values)
            self._entries[role] = self._numbers.add(value, dtype)
        return self._entries[role]

    def finish(self) -> None:
        """Called at the end of the update."""
        if self._roles is not None and next(self._roles, None) is not None:
            self.reason = "its update uses fewer numbers than on stand-ins"


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and value.device.type == "cpu"
    return isinstance(value, Real) and not isinstance(value, bool)


def _scaled(func: Callable[..., Any], name: str, values: list[Any], scale: torch.Tensor) -> Any:
    """An operator with an `alpha` or a `value`."""
    tensor, *others = values
    if name == "addcmul":
        term = others[0] * scale * others[1]
    elif name == "addcdiv":
        term = others[0] * scale / others[1]
    else:
        term = others[0] * scale
    # Of add and sub both forms, in place and not, are the function itself.
    if name in ("add", "sub"):
        return func(tensor, term)
    return tensor.add_(term) if func.__name__.endswith("_") else tensor + term
