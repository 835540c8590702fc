"""`Update`: what an optimizer computes on the host in one update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Update:
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

    def takes_another_course(self, other: Update) -> bool:
        """Whether the graph of this update differs from that of another one."""
        return self.operators != other.operators or self.constants != other.constants


def numbers_of(updates: Sequence[Update]) -> list[float]:
    """The numbers of several updates, in order."""
    return [number for update in updates for number in update.numbers]
