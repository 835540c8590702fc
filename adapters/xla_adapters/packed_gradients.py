"""`PackedGradients`: gradients that a replay leaves behind in rows of numbers, until somebody uses one of them."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Hashable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from xla_adapters.backend import Backend
from xla_adapters.errors import DiscardedTensorError
from xla_adapters.location import current_location
from xla_adapters.packed_state import apart, mark, unmark

_all: weakref.WeakSet[PackedGradients] = weakref.WeakSet()
_grad = attrgetter("grad")
_use_count = torch.Tensor._use_count  # type: ignore[attr-defined]


class _Left:
    """Gradients that a replay has left behind.

    Nothing here leads to the parameters, which lead here through C++: they would never be collected.
    """

    def __init__(self, lock: threading.RLock, backend: Backend) -> None:
        self.lock = lock
        self.values: list[torch.Tensor] = []
        self.stand_ins: list[torch.Tensor] = []
        self.hooks: list[RemovableHandle] = []
        self._backend = backend
        self._rows: list[list[torch.Tensor]] = []
        self._marks: tuple[list[int], list[int]] = ([], [])
        self.is_packed = False
        self._is_written = False

    def begin(self, rows: Sequence[Sequence[torch.Tensor]], hooks: Sequence[RemovableHandle]) -> None:
        """From here on there are these stand-ins."""
        self._rows = [list(row) for row in rows]
        self.stand_ins = [tensor for row in rows for tensor in row]
        self.hooks = list(hooks)
        self._marks = self._backend.storage_marks(self.stand_ins)
        self._is_written = False
        self.is_packed = True
        mark(self.stand_ins, self)

    def unpack(self) -> None:
        """Gives the stand-ins their numbers; they are plain tensors then.

        Raises:
            DiscardedTensorError: autograd has added to one where nobody saw it. All others have their numbers.
        """
        with self.lock:
            lost: list[int] = []
            if self.is_packed:
                with torch.no_grad(), torch._C.DisableTorchFunction():
                    lost = self._bring_back()
                self.is_packed = False
            # Last of all, and again if this is interrupted: those that are still marked have their numbers.
            unmark(self.stand_ins, self)
            for hook in self.hooks:
                hook.remove()
            self.stand_ins, self.values, self.hooks, self._rows = [], [], [], []
        if lost:
            raise DiscardedTensorError(_added_to())

    def _bring_back(self) -> list[int]:
        """Returns the positions of those that were written to."""
        backend = self._backend
        lost: list[int] = []
        if not self._is_written:
            (names, writes), (former, before) = backend.storage_marks(self.stand_ins), self._marks
            marks = enumerate(zip(names, writes, former, before, strict=True))
            lost = [at for at, (name, count, name_then, then) in marks if (name, count) != (name_then, then)]
        values = apart(self.values, self._rows, backend)
        # From here on it is this that has written.
        self._is_written = True
        kept = [at for at in range(len(values)) if at not in lost]
        backend.write([self.stand_ins[at] for at in kept], [values[at] for at in kept])
        backend.forget_writes([self.stand_ins[at] for at in kept])
        return lost


class PackedGradients:
    """Gradients that lie in rows behind each replay of a step that leaves them to whoever looks for them.

    The parameters have stand-ins (`PackedTensor`) as long as nobody does. Autograd, which adds to a gradient without
    asking anybody, has them brought back first, too; so does the end of this object.

    Args:
        rows: the parameters of each row, in order.
        values: for each dtype and shape of theirs any value on the device (as `Backend.inner`); best one whose buffer
            is gone, so that what uses it fails.
        lock: held by a replay.
        backend: the seam.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[torch.Tensor]],
        values: Mapping[Hashable, torch.Tensor],
        lock: threading.RLock,
        backend: Backend,
    ) -> None:
        self._rows = [list(row) for row in rows]
        self._leaves = [leaf for row in rows for leaf in row]
        self._any = dict(values)
        self._lock = lock
        self._backend = backend
        self._left = _Left(lock, backend)
        # Of each stand-in: who holds it in Python, and who in C++ (a parameter's `grad` is there).
        self._holders: list[int] = []
        self._uses: list[int] = []
        self._nodes: list[Any] = []
        self._are_at_hand = False
        _all.add(self)
        weakref.finalize(self, self._left.unpack).atexit = False

    @classmethod
    def of(
        cls,
        rows: Sequence[Sequence[torch.Tensor]],
        values: Mapping[Hashable, torch.Tensor],
        lock: threading.RLock,
        backend: Backend,
    ) -> PackedGradients:
        """The one that has these rows already, or a new one."""
        ids = [list(map(id, row)) for row in rows]
        of_lock = (item for item in list(_all) if item._lock is lock)
        known = (item for item in of_lock if [list(map(id, row)) for row in item._rows] == ids)
        return next(known, None) or cls(rows, values, lock, backend)

    def begin_pass(self) -> None:
        """A pass is about to be executed that leaves gradients behind. Who holds one of those that are there keeps it.

        Raises:
            DiscardedTensorError: autograd has added to one where nobody saw it.
        """
        with self._lock, torch._C.DisableTorchFunction():
            self._are_at_hand = self._find_at_hand()
            if not self._are_at_hand:
                self._left.unpack()

    def leave(self, values: Sequence[torch.Tensor]) -> None:
        """The pass has left these rows behind."""
        with self._lock:
            if not self._are_at_hand:
                self._stand_in()
            self._left.values = list(values)

    def _find_at_hand(self) -> bool:
        """Whether the stand-ins are the parameters' gradients, and nobody else has one of them."""
        stand_ins = self._left.stand_ins
        if not self._left.is_packed or list(map(sys.getrefcount, stand_ins)) != self._holders:
            return False
        present = list(map(_grad, self._leaves))
        uses = list(map(_use_count, stand_ins))
        if all(map(is_, present, stand_ins)):
            return uses == self._uses
        # Whoever drops them between two steps has them again.
        dropped = [position for position, grad in enumerate(present) if grad is None]
        for position in dropped:
            uses[position] += 1
            present[position] = stand_ins[position]
        if uses != self._uses or not all(map(is_, present, stand_ins)):
            return False
        for position in dropped:
            self._leaves[position].grad = stand_ins[position]
        return True

    def _stand_in(self) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            rows = [[torch._to_functional_tensor(self._any[form_of(leaf)]) for leaf in row] for row in self._rows]
            if not self._nodes:
                self._nodes = list(map(_accumulation, self._leaves))
            left = self._left
            hooks = [node.register_prehook(lambda _: left.unpack()) for node in self._nodes]
            left.begin(rows, hooks)
            for leaf, stand_in in zip(self._leaves, left.stand_ins, strict=True):
                leaf.grad = stand_in
        # Without the names that they have here.
        del stand_in
        rows.clear()
        self._holders = list(map(sys.getrefcount, left.stand_ins))
        self._uses = list(map(_use_count, left.stand_ins))


def _added_to() -> str:
    return (
        "a gradient that a replayed step left behind was made another tensor's, too, and added to by a backward pass "
        f"from there, which replays cannot see (found at {current_location()}). Give the other one a copy: "
        "other.grad = parameter.grad.clone()"
    )


def form_of(tensor: torch.Tensor) -> Hashable:
    """What another value of the same kind has in common with a tensor's."""
    return tensor.dtype, tensor.shape


def _accumulation(leaf: torch.Tensor) -> Any:
    """What adds to its gradient (the node of `torch.autograd.graph.get_gradient_edge`)."""
    with torch.enable_grad():
        function = leaf.view_as(leaf).grad_fn
    assert function is not None
    return function.next_functions[0][0]
