"""`PackedState`: tensors of an optimizer's state whose numbers lie elsewhere, until somebody uses one of them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence, Set
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from xla_adapters.backend import Backend
from xla_adapters.errors import DiscardedTensorError
from xla_adapters.nested_values import tensors_in
from xla_adapters.waiting_steps import METADATA, storage_of

_states: weakref.WeakSet[PackedState] = weakref.WeakSet()
_holders: weakref.WeakSet[Holder] = weakref.WeakSet()
_watched: weakref.WeakSet[Optimizer] = weakref.WeakSet()


# Autograd asks for the size of what it is given to begin with, and for no number of it, before it goes on in C++.
_METADATA = METADATA - {torch.Tensor.size}


class Holder(Protocol):
    """What has the numbers of packed tensors."""

    def unpack(self) -> None:
        """Moves them back to the tensors, which are plain ones then."""


class PackedTensor(torch.Tensor):
    """A tensor whose numbers lie with those of others. Whoever uses it, by whatever name, has them all back.

    It is the same object as before and afterwards, a plain tensor then.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        unpack(tensors_in((args, kwargs)))
        return func(*args, **kwargs)


class PackedState:
    """Tensors in rows.

    Args:
        rows: the tensors of each row, in order.
        backend: the seam.
    """

    def __init__(self, rows: Sequence[Sequence[torch.Tensor]], backend: Backend) -> None:
        self._rows = [list(row) for row in rows]
        self._tensors = [tensor for row in rows for tensor in row]
        self._ids = frozenset(map(id, self._tensors))
        self._backend = backend
        self._values: list[torch.Tensor] = []
        # The buffers of tensors that hold what the rows hold; and what keeps others from getting their names.
        self._same: list[int] = []
        self._kept: list[torch.Tensor] = []
        self._is_packed = False
        # Held by a replay as long as it has the rows.
        self.lock = threading.RLock()
        _states.add(self)

    @property
    def is_packed(self) -> bool:
        """Whether the rows hold the numbers, and the tensors do not."""
        return self._is_packed

    def row(self, number: int) -> torch.Tensor:
        """A row, which steps read and write."""
        return self._values[number]

    @classmethod
    def of(cls, rows: Sequence[Sequence[torch.Tensor]], backend: Backend) -> PackedState:
        """The one that has these rows already, or a new one."""
        ids = [list(map(id, row)) for row in rows]
        known = (state for state in list(_states) if [list(map(id, row)) for row in state._rows] == ids)
        return next(known, None) or cls(rows, backend)

    def has_any(self, tensors: Set[int]) -> bool:
        """Whether one of these tensors (by `id`) is its own."""
        return not self._ids.isdisjoint(tensors)

    def obstacle(self) -> str | None:
        """Why the tensors cannot be packed any more, in words; None if they can."""
        if self._is_packed:
            return None
        if any(type(tensor) not in (torch.Tensor, PackedTensor) for tensor in self._tensors):
            return "a tensor of the optimizer's state is of a class of its own"
        if any(map(has_alias, self._tensors)):
            return "a view of a tensor of the optimizer's state is held, which would not see what a replay writes"
        return None

    def pack(self) -> None:
        """Moves the numbers to the rows, if they are not there."""
        if not self._is_packed:
            unpack_rows(self._ids)
            values = [self._backend.snapshot(tensor) for tensor in self._tensors]
            self._backend.compute(values)
            self.take(values)
            self.tensors_left()

    def take(self, values: Sequence[torch.Tensor]) -> None:
        """Fills the rows with these values of the tensors; they hold the numbers from `tensors_left` on."""
        # What is under way has another handle once it has ended.
        self._backend.wait()
        if self._same and self._backend.handles(values) == self._same:
            return
        hosts = self._backend.to_host(values)
        rows = []
        for row in self._rows:
            rows.append(torch.cat([host.reshape(-1) for host in hosts[: len(row)]]))
            hosts = hosts[len(row) :]
        self._values = [self._backend.to_device(row) for row in rows]
        self._same, self._kept = [], []

    def tensors_left(self) -> None:
        """From here on the rows hold the numbers. The tensors of one form share some buffer or other."""
        self._same, self._kept = [], []
        self._is_packed = True
        # First of all: who uses one of them in another thread waits until they can be brought back.
        mark(self._tensors, self)
        values: dict[tuple[torch.dtype, torch.Size], torch.Tensor] = {}
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in self._tensors:
                value = values.setdefault((tensor.dtype, tensor.shape), self._backend.snapshot(tensor))
                self._backend.restore(tensor, value)
            self._backend.forget_writes(self._tensors)

    def unpack(self) -> None:
        """Moves the numbers back to the tensors: a copy to the host, and one to the device."""
        with self.lock:
            if self._is_packed:
                self._bring_back()
            # Last of all, and again if this is interrupted: those that are still marked have their numbers.
            unmark(self._tensors, self)

    def _bring_back(self) -> None:
        backend = self._backend
        with torch._C.DisableTorchFunctionSubclass():
            backend.write(self._tensors, apart(self._values, self._rows, backend))
            backend.forget_writes(self._tensors)
            values = [backend.snapshot(tensor) for tensor in self._tensors]
            # Not these themselves: what writes in place may change them.
            self._kept = [backend.twin(value) for value in values]
            self._same = backend.handles(values)
        self._is_packed = False


def apart(
    values: Sequence[torch.Tensor], rows: Sequence[Sequence[torch.Tensor]], backend: Backend
) -> list[torch.Tensor]:
    """What rows hold, each tensor by itself: a copy to the host, and one to the device.

    Args:
        values: the rows.
        rows: for each one tensors that have the shapes.
        backend: the seam.
    """
    parts: list[torch.Tensor] = []
    for row, host in zip(rows, backend.to_host(values), strict=True):
        for tensor, part in zip(row, host.split([tensor.numel() for tensor in row]), strict=True):
            parts.append(part.reshape(tensor.shape))
    return backend.to_device_together(parts)


def mark(tensors: Iterable[torch.Tensor], holder: Holder) -> None:
    """Has tensors known as packed."""
    _holders.add(holder)
    for tensor in tensors:
        vars(tensor)["_packed_in"] = holder
        tensor.__class__ = PackedTensor


def unmark(tensors: Iterable[torch.Tensor], holder: Holder) -> None:
    """Makes those of them plain tensors again whose numbers this had."""
    for tensor in tensors:
        if vars(tensor).get("_packed_in") is holder:
            tensor.__class__ = torch.Tensor
            del vars(tensor)["_packed_in"]


def unpack(tensors: Iterable[torch.Tensor], *, but: Holder | None = None) -> None:
    """Has those of these tensors hold their own numbers that are packed, and all that lie with them.

    Args:
        tensors: of any kind.
        but: whose are left as they are.
    """
    for tensor in tensors:
        if type(tensor) is PackedTensor:
            holder = vars(tensor).get("_packed_in")
            if holder is not None and holder is not but:
                holder.unpack()


def unpack_all() -> None:
    """Has all tensors hold their own numbers.

    Raises:
        DiscardedTensorError: some are lost; all others are there.
    """
    lost: DiscardedTensorError | None = None
    for holder in list(_holders):
        try:
            holder.unpack()
        except DiscardedTensorError as error:
            lost = lost or error
    if lost is not None:
        raise lost


def unpack_rows(among: Set[int]) -> None:
    """Has tensors on the device hold their own numbers, if one of these (by `id`) is packed with them."""
    for state in list(_states):
        if state.is_packed and state.has_any(among):
            state.unpack()


def watch(optimizers: Iterable[Optimizer]) -> None:
    """Has all numbers brought back when one of these is asked for its state, whatever is done with it then."""
    for optimizer in optimizers:
        # Each traced pass comes here.
        if optimizer not in _watched:
            _watched.add(optimizer)
            optimizer.register_state_dict_pre_hook(_unpack_state)


def _unpack_state(optimizer: Optimizer) -> None:
    unpack(tensors_in(list(optimizer.state.values())))


def has_alias(tensor: torch.Tensor) -> bool:
    """Whether a view of the tensor is held, or another one that has the same numbers."""
    return torch._C._storage_Use_Count(storage_of(tensor)) > 1
