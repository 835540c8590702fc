"""`TracedTensors`: the tensors of a trace, which have no value yet."""

from __future__ import annotations

import weakref

import torch

from xla_adapters.errors import PlaceholderError
from xla_adapters.utils.location import current_location
from xla_adapters.utils.torch_modes import unwrapped


class TracedTensors:
    """Knows which tensors a trace has made, and which of them can still be used.

    A tensor belongs to the trace if its storage does: views and aliases share it. Storages are referenced, so that no
    later one gets the address of one that was freed. A tensor that a transform of `torch.func` has wrapped stands for
    the one in it.
    """

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is part of the trace."""
        return _storage_of(tensor)._cdata in self._storages

    def add(self, tensor: torch.Tensor) -> None:
        """Adds what a tensor shares with its views, but not the tensor to those that `alive` returns."""
        storage = _storage_of(tensor)
        self._storages.setdefault(storage._cdata, storage)

    def note(self, tensor: torch.Tensor) -> None:
        """Adds a tensor that an operation of the trace has returned."""
        self.add(tensor)
        tensor = unwrapped(tensor)
        known = self._made.get(id(tensor))
        if known is None or known() is not tensor:
            # Another tensor had this address: in the order in which they are made this one comes last.
            self._made.pop(id(tensor), None)
            self._made[id(tensor)] = weakref.ref(tensor)

    def alive(self) -> list[torch.Tensor]:
        """The noted tensors that code can still use."""
        found = (reference() for reference in self._made.values())
        return [tensor for tensor in found if tensor is not None and self.has(tensor)]


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        inner = unwrapped(tensor)
        if inner is not tensor:
            return _storage_of(inner)
        raise PlaceholderError(
            f"the step uses a tensor of the layout {tensor.layout}, which has no memory of its own to trace: make it "
            f"dense before the step (.to_dense())\n  at {current_location()}"
        ) from None
