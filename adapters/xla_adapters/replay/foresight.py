"""`Foresight`: the host's part of updates to come, computed in one go while an optimizer's settings stay the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch.optim import Optimizer

# So many are computed at once. By itself, between two steps that the device executes, one takes five times as long.
_UPDATES = 8
_CONSTANT = frozenset({bool, int, float, str, type(None)})


@dataclass(frozen=True, kw_only=True)
class Update:
    """The host's part of one update.

    Attributes:
        numbers: the Python numbers that reach operators, in order.
        operators: the operators, in order: another sequence is another graph.
        advance: brings step counts and the like to their state behind the update.
        counts: these, if they are all that the update changes on the host.
    """

    numbers: tuple[float, ...]
    operators: tuple[Callable[..., Any], ...]
    advance: Callable[[], None]
    counts: tuple[torch.Tensor, ...] | None = None


class Foresight:
    """Knows updates before their time.

    Args:
        play: computes an update, given the step counts before it (or those that the optimizer has).
    """

    def __init__(self, play: Callable[[Sequence[torch.Tensor] | None], Update]) -> None:
        self._play = play
        self._settings: _Settings | None = None
        # With the counts before each.
        self._updates: deque[tuple[tuple[torch.Tensor, ...], Update]] = deque()

    def next(self, optimizer: Optimizer, counts: Sequence[torch.Tensor | None]) -> Update:
        """The update that comes next.

        Args:
            optimizer: whose settings it has.
            counts: as the last update left them; None for those that somebody used since.
        """
        is_steady = self._settings is not None and self._settings.are_of(optimizer)
        if is_steady and self._updates and all(map(is_, counts, self._updates[0][0])):
            return self._updates.popleft()[1]
        self._updates.clear()
        if not is_steady:
            self._settings = _Settings.of(optimizer)
        update = last = self._play(None)
        if is_steady and all(value is not None for value in counts):
            while last.counts is not None and len(self._updates) < _UPDATES:
                before = last.counts
                last = self._play(before)
                self._updates.append((before, last))
        return update


@dataclass(frozen=True)
class _Settings:
    """All that an optimizer's groups hold."""

    names: list[str]
    types: list[type]
    values: list[Any]

    @classmethod
    def of(cls, optimizer: Optimizer) -> _Settings | None:
        """As they are now; None if they cannot be compared."""
        names, types, values = _found(optimizer.param_groups)
        plain = [name == "params" or _stays(value) for name, value in zip(names, values, strict=True)]
        # Lists may be changed in place.
        return cls(names, types, list(map(_kept, values))) if all(plain) else None

    def are_of(self, optimizer: Optimizer) -> bool:
        """Whether they are the same still, told in loops that run in C."""
        names, types, values = _found(optimizer.param_groups)
        # Types first: of these here the comparison is nobody's Python.
        return names == self.names and types == self.types and values == self.values


def _found(groups: Sequence[dict[str, Any]]) -> tuple[list[str], list[type], list[Any]]:
    values = list(chain.from_iterable(map(dict.values, groups)))
    return list(chain.from_iterable(groups)), list(map(type, values)), values


def _kept(value: Any) -> Any:
    if type(value) is list:
        return list(map(_kept, value))
    return tuple(map(_kept, value)) if type(value) is tuple else value


def _stays(value: Any) -> bool:
    return all(map(_stays, value)) if type(value) in (tuple, list) else type(value) in _CONSTANT
