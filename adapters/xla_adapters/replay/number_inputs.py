"""`Number`: an input of a step's graph that was a Python number when it was traced (a learning rate, say).

`HostUpdate`: what an optimizer computes on the host in one update, from which such numbers come.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from xla_adapters.replay.tensor_places import CannotReplay

# Numbers that operators use by themselves (the alpha of an addition): an input with one of these values that equals a
# number of the optimizer may be either.
_OF_OPERATORS = (0.0, 1.0, -1.0, 2.0, 0.5)


@dataclass
class Number:
    """An input that was a Python number when it was traced.

    Several Python numbers that were equal may share one input.

    Attributes:
        value: on the device.
        of_update: whether only an optimizer's update reads it.
        roles: which of the optimizer's numbers it may be, by position.
        constant: whether it may also be a number that does not change.
        present: its value on the host.
    """

    value: torch.Tensor
    of_update: bool = False
    roles: tuple[int, ...] = ()
    constant: bool = True
    present: float = 0.0

    def next(self, numbers: Sequence[float]) -> float:
        """Its value in the next call of the step.

        Args:
            numbers: the optimizer's numbers for that call.

        Raises:
            CannotReplay: numbers that shared this input are not equal any more.
        """
        dtype = self.value.dtype
        values = {cast(numbers[role], dtype) for role in self.roles}
        if self.constant:
            values.add(self.present)
        if len(values) != 1:
            raise CannotReplay("two numbers of the step were equal, shared an input of its graph, and are not any more")
        return values.pop()


def cast(value: float, dtype: torch.dtype) -> float:
    """A number rounded to a dtype."""
    # ctypes takes a twentieth of the time that a tensor takes, and nearly all numbers are float32.
    return ctypes.c_float(value).value if dtype == torch.float32 else float(torch.tensor(value, dtype=dtype))


def find_roles(
    numbers: Sequence[Number],
    present: Sequence[float],
    earlier: Sequence[float],
    optimizers: Sequence[float],
    optimizers_before: Sequence[float],
) -> list[tuple[int, float]]:
    """Finds out, from two calls of a step, which inputs are which numbers of the optimizers.

    Args:
        numbers: the inputs; their roles are set.
        present: their values in the second call.
        earlier: their values in the first call.
        optimizers: the numbers that the optimizers computed in the second call.
        optimizers_before: those of the first call.

    Returns:
        The numbers of the optimizers that are no input, as pairs of position and value. They are constants of the
        graph, or have no effect.

    Raises:
        CannotReplay: a number changes that is none of the optimizers'.
    """
    for number, now, before in zip(numbers, present, earlier, strict=True):
        dtype = number.value.dtype
        number.present = now
        number.roles = tuple(
            role
            for role in range(len(optimizers) if number.of_update else 0)
            if cast(optimizers[role], dtype) == now and cast(optimizers_before[role], dtype) == before
        )
        # NaN is not equal to itself.
        if not number.roles and now != before and not (now != now and before != before):
            raise CannotReplay(f"a Python number in the graph changes from call to call ({before:g}, {now:g})")
        number.constant = not number.roles or (now == before and now in _OF_OPERATORS)
    roles = {role for number in numbers for role in number.roles}
    return [(role, value) for role, value in enumerate(optimizers) if role not in roles]


# ---- of an optimizer -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HostUpdate:
    """The host math of one update, without its tensors.

    Attributes:
        numbers: the Python numbers that operators are given and that may be inputs of the graph, in order.
        constants: the text of the other arguments that are no tensors, in order. They are part of the graph.
        operators: the operators, in order.
        advance: sets step counts and the like to their values after the update.
    """

    numbers: tuple[float, ...]
    constants: tuple[str, ...]
    operators: tuple[Callable[..., Any], ...]
    advance: Callable[[], None]

    def takes_another_course(self, other: HostUpdate) -> bool:
        """Whether the graph of this update differs from that of another one."""
        return self.operators != other.operators or self.constants != other.constants


def numbers_of(updates: Sequence[HostUpdate]) -> list[float]:
    """The numbers of several updates, in order."""
    return [number for update in updates for number in update.numbers]
