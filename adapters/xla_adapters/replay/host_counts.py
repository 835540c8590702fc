"""`HostCounts`: numbers that an optimizer keeps on the host, one tensor for each parameter."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from operator import attrgetter

import torch

from xla_adapters.packed_state import has_alias, mark, unmark, unpack

_version = attrgetter("_version")


class HostCounts:
    """Step counts and the like, of parameters that the host treats alike.

    Each step gives all of them one value. It is written to the tensors when somebody uses one: until then they are
    known as packed.

    Args:
        tensors: on the host, with one element each.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._value: torch.Tensor | None = None
        self._lock = threading.RLock()

    @property
    def is_ahead(self) -> bool:
        """Whether they have a value that is not written yet. Nobody has used one of them since."""
        return self._value is not None

    @property
    def ahead(self) -> torch.Tensor | None:
        """That value, as it was given to `set`."""
        return self._value

    @property
    def value(self) -> torch.Tensor:
        """What all of them are, in a tensor of its own."""
        value = self._value
        if value is None:
            value = self._tensors[0]
            unpack([value])
        return value.clone()

    @property
    def version(self) -> int:
        """How often they were written to, all in all; what is not written yet is no part of it."""
        # Recipes of other signatures may have some of these.
        unpack(self._tensors, but=self)
        return sum(map(_version, self._tensors))

    def are_alike(self) -> bool:
        """Whether all have the same value."""
        if self.is_ahead:
            return True
        unpack(self._tensors)
        first = self._tensors[0].tolist()
        return all(tensor.tolist() == first for tensor in self._tensors)

    def set(self, value: torch.Tensor) -> None:
        """Gives all of them one value."""
        with self._lock:
            if self.is_ahead:
                self._value = value
                return
            unpack(self._tensors)
            if any(type(tensor) is not torch.Tensor or has_alias(tensor) for tensor in self._tensors):
                # Nobody tells when a view of it is read, and who has a class of its own is to keep it.
                self._write(value)
                return
            mark(self._tensors, self)
            self._value = value

    def unpack(self) -> None:
        """Writes the value to the tensors, which are plain ones then."""
        with self._lock:
            if self._value is not None:
                self._write(self._value)
                self._value = None
            # Last of all, and again if this is interrupted: those that are still marked have their numbers.
            unmark(self._tensors, self)

    def _write(self, value: torch.Tensor) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            torch._foreach_copy_(self._tensors, [value] * len(self._tensors))
