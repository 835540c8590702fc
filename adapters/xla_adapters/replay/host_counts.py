"""`HostCounts`: numbers that an optimizer keeps on the host, one tensor for each parameter."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

_OF_NUMPY = (torch.float32, torch.float64, torch.int64, torch.int32)
_version, _data_ptr = attrgetter("_version"), torch.Tensor.data_ptr


class HostCounts:
    """Step counts and the like, of parameters that the host treats alike.

    Args:
        tensors: on the host, with one element each.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._arrays: list[Any] = []
        self._addresses: list[int] = []

    @property
    def version(self) -> int:
        """How often they were written to, all in all."""
        return sum(map(_version, self._tensors))

    def are_alike(self) -> bool:
        """Whether all have the same value."""
        first = self._tensors[0].tolist()
        return all(tensor.tolist() == first for tensor in self._tensors)

    def set(self, value: torch.Tensor) -> None:
        """Gives all of them one value."""
        if value.dtype not in _OF_NUMPY:
            torch._foreach_copy_(self._tensors, [value] * len(self._tensors))
            return
        # A fraction of what torch's own copies cost, for numbers that are one per parameter. An array holds on to the
        # memory of its tensor: as long as that lives, the address is nobody else's.
        addresses = list(map(_data_ptr, self._tensors))
        if addresses != self._addresses:
            self._arrays = [tensor.numpy() for tensor in self._tensors]
            self._addresses = addresses
        number = value.item()
        for array in self._arrays:
            array.fill(number)
        # Recipes of other signatures, which may update only some of these, see by it that they changed.
        torch.autograd.graph.increment_version(self._tensors)
