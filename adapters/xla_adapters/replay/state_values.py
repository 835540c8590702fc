"""`StateValues`: the values of a step's state, kept from one replay to the next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_

import torch

from xla_adapters.runtime import Runtime


class StateValues:
    """The device values of the tensors that replays read and write.

    To ask a tensor for its value, torch first applies pending writes to its views. For a large state that takes longer
    than the rest of a replay on the host. So the values are kept. Two things tell whether they are still those of the
    tensors: the counter of a storage changes with each write, also with one through a view or an alias; and a tensor
    that became a view of its storage (`p.data = p.data.t()`) holds another object.

    Args:
        tensors: of the state.
        traced: which of them, and of the tensors elsewhere, shared their storage when the step was traced (`groups`).
        runtime: the runtime.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], traced: tuple[int, ...], runtime: Runtime) -> None:
        self._tensors = list(tensors)
        self._traced = traced
        # Looked up here, since each replayed call uses them.
        self._snapshot = runtime.values.snapshot
        self._inner = runtime.lazy.inner
        self._storage_marks = runtime.lazy.storage_marks
        self._number = runtime.lazy.tensor_number
        self._replace = runtime.lazy.replace
        self._forget_writes = runtime.lazy.forget_writes
        self._values = [self._snapshot(tensor) for tensor in self._tensors]
        # Referenced, so that no new storage gets the address of an old one.
        self._storages = [tensor.untyped_storage() for tensor in self._tensors]
        self._names, self._changes = self._storage_marks(self._tensors)
        # Positions of tensors whose present value was not written by `write`.
        self._foreign = set(range(len(self._tensors)))
        # Positions of tensors that may be parts of others, since `write` has not seen yet that they are none.
        self._parts = set(range(len(self._tensors)))
        self._named: list[int] = []
        self._first: dict[int, int] = {}
        self._now: tuple[int, ...] = ()
        runtime.shared_buffers.note_writer(self)

    def sharing(self, elsewhere: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> str | None:
        """Which tensors share their storage otherwise than in the traced step, in words; None if none do.

        Args:
            elsewhere: at the places outside of the state (gradients, say).
            others: tensors that must be none of these, no view and no alias of one.
        """
        names, _ = self._storage_marks(self._tensors)
        if names != self._named:
            self._named, self._first = names, {}
            self._now = groups(names, self._first)
        now, first = self._now, self._first
        if elsewhere:
            first = dict(first)
            now += groups(self._storage_marks(elsewhere)[0], first)
        # (`p.data = q.data`, `p.grad = q.grad`.) One executable updates shared tensors together, the other each by
        # itself, and would be given one buffer twice to reuse.
        if now != self._traced:
            return "other tensors of the state share their storage than when the step was traced"
        found, _ = self._storage_marks(others)
        if any(name in first for name in found):
            return "a tensor of the batch is one of the state"
        return None

    def present(self) -> list[torch.Tensor]:
        """The present values (as `Values.snapshot`)."""
        names, changes = self._storage_marks(self._tensors)
        inner = list(map(self._inner, self._tensors))
        same_objects = all(map(is_, inner, self._values))
        if names != self._names or changes != self._changes or not same_objects:
            for position, tensor in enumerate(self._tensors):
                is_other = names[position] != self._names[position] or inner[position] is not self._values[position]
                if is_other or changes[position] != self._changes[position]:
                    self._values[position] = self._snapshot(tensor)
                    self._storages[position] = tensor.untyped_storage()
                    self._foreign.add(position)
                    if is_other:
                        self._parts.add(position)
            self._names, self._changes = names, changes
        return self._values

    def write(self, positions: Sequence[int], values: Sequence[torch.Tensor]) -> None:
        """Sets the values (as `LazyTensors.inner`) of tensors, of their views and of their aliases.

        Args:
            positions: of the tensors.
            values: one for each position.
        """
        self._replace([self._tensors[position] for position in positions], values)
        for position, value in zip(positions, values, strict=True):
            self._values[position] = value
            self._changes[position] += 1
        if self._foreign:
            self._foreign.difference_update(positions)
        if self._parts and (parts := self._parts.intersection(positions)):
            self._look_at_parts(parts)

    def _look_at_parts(self, positions: set[int]) -> None:
        """Applies what was written to parts of larger tensors (`p.data = large[2:6]`) to these.

        The larger tensor reads the written value for that, whose buffer the next call would reuse. The part has a new
        value then.
        """
        for position in positions:
            tensor, written = self._tensors[position], self._values[position]
            self._values[position] = self._snapshot(tensor)
            if self._number(self._values[position]) == self._number(written):
                self._parts.discard(position)
        tensors = [self._tensors[position] for position in positions]
        for position, changes in zip(positions, self._storage_marks(tensors)[1], strict=True):
            self._changes[position] = changes

    def computed(self) -> list[torch.Tensor]:
        """The tensors whose present value was set by `write`."""
        names, changes = self._storage_marks(self._tensors)
        return [
            tensor
            for position, tensor in enumerate(self._tensors)
            if position not in self._foreign
            and names[position] == self._names[position]
            and changes[position] == self._changes[position]
            and self._inner(tensor) is self._values[position]
        ]

    def forget_writes(self) -> None:
        """Releases the values that `write` has replaced."""
        self._forget_writes(self._tensors)


def groups(names: Iterable[int], first: dict[int, int]) -> tuple[int, ...]:
    """For each name its place among the different ones.

    Args:
        names: of storages.
        first: the places of names that came before; gets those of new ones.
    """
    return tuple(first.setdefault(name, len(first)) for name in names)
