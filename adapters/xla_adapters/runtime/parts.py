"""`Part`: what one device holds of a cut tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one device holds of a cut tensor.

    Attributes:
        offsets: of its first element, along each dimension of the tensor.
        sizes: along each dimension, without the padding of a dimension that does not divide.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where it lies in the whole."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))

    def without_padding(self, shard: torch.Tensor) -> torch.Tensor:
        """The part of a device's buffer that has values."""
        return shard[tuple(slice(0, size) for size in self.sizes)]

    def with_padding(self, values: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """The device's buffer for these values, which has the same size on every device."""
        missing = [size - own for size, own in zip(sizes, self.sizes, strict=True)]
        if not any(missing):
            return values.contiguous()
        return torch.nn.functional.pad(values, [n for size in reversed(missing) for n in (0, size)])
