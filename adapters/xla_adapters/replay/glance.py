"""`Glance`: whether anything was touched that a step depends on, told in loops that run in C."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, eq, is_, itemgetter
from typing import Any, Protocol

import torch

from xla_adapters.replay.values import copied, differs, is_simple

# The last is there on tensors of PyTorch 2.1 and later.
_traits = attrgetter("requires_grad", "dtype", "shape", "_backward_hooks", "_post_accumulate_grad_hooks")
# Those that can hold something else and be the same object. A tuple can hold one of them, too.
_CONTAINERS = (dict, list, set, tuple)


class Seen(Protocol):
    """Something whose changes a glance notices."""

    def show(self, glance: Glance) -> None:
        """Hands it what it shall look at."""


class Glance:
    """Notices that something was touched. What that was, and whether it matters, is for those to say who were shown.

    A step of twelve layers depends on some thousand attributes, modules and tensors. To compare each in Python takes
    several times what all other work of a replay's guards does. Here all are held against what they were by
    identity, without a line of Python for each.

    Args:
        shown: what it shall look at.
    """

    def __init__(self, shown: Iterable[Seen]) -> None:
        self._owners: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        self._sized: list[dict[str, Any]] = []
        self._groups: list[dict[Any, Any]] = []
        self._tensors: list[torch.Tensor] = []
        for item in shown:
            item.show(self)
        self._empty = [group for group in self._groups if not group]
        self._filled = [group for group in self._groups if group]
        self._fetches = [(itemgetter(*names), owners) for names, owners in self._owners.items()]
        self._objects = list(self._find_objects())
        self._keys = list(chain.from_iterable(self._filled))
        self._sizes = list(map(len, self._sized))
        self._found_traits = list(map(_traits, self._tensors))
        attributes = chain.from_iterable(self._find_attributes())
        known = set(map(id, self._groups))
        containers = [item for item in attributes if type(item) in _CONTAINERS and id(item) not in known]
        # Nothing in a tuple of plain values can change.
        filled = [item for item in containers if item and not (type(item) is tuple and is_simple(item, 1))]
        self._containers = [(item, copied(item)) for item in filled if is_simple(item)]
        self._empty += [item for item in containers if not item]

    def attributes(self, owner: dict[str, Any], names: Sequence[str]) -> None:
        """What stands under these names."""
        if names:
            # With one name it would hand out the value, and no tuple of values.
            self._owners.setdefault((*names, names[0]), []).append(owner)

    def size(self, owner: dict[str, Any]) -> None:
        """How many attributes there are."""
        self._sized.append(owner)

    def contents(self, group: dict[Any, Any]) -> None:
        """What a dictionary holds, under which keys and in which order."""
        self._groups.append(group)

    def tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        """Mode, shape, hooks and attributes of tensors."""
        for tensor in tensors:
            self._tensors.append(tensor)
            self._groups.append(vars(tensor))
            self._groups.extend(hooks for hooks in _traits(tensor)[-2:] if hooks is not None)

    def touched(self) -> bool:
        """Whether anything is another than when this was made."""
        if (
            any(self._empty)
            or not all(map(eq, map(len, self._sized), self._sizes))
            # With as many keys there are as many values.
            or list(chain.from_iterable(self._filled)) != self._keys
        ):
            return True
        try:
            are_same = all(map(is_, self._find_objects(), self._objects))
        except KeyError:
            return True
        return (
            not are_same
            # Modes, types, shapes and dictionaries of hooks: nothing whose comparison is anybody's Python.
            or not all(map(eq, map(_traits, self._tensors), self._found_traits))
            or any(differs(container, copy) for container, copy in self._containers)
        )

    def _find_attributes(self) -> Iterator[tuple[Any, ...]]:
        return chain.from_iterable(map(fetch, owners) for fetch, owners in self._fetches)

    def _find_objects(self) -> Iterator[Any]:
        # One after the other, and none kept: what is allocated would be so where the caches are cold.
        return chain.from_iterable(chain(self._find_attributes(), map(dict.values, self._filled)))
