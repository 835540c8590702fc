"""How a tensor is cut over devices: `TileAssignment`, in the notations of torch_xla 2.9, and `Part`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

# torch_xla.distributed.spmd.ShardingType
_REPLICATED, _TILED, _PARTIAL = 0, 3, 5


@dataclass(frozen=True, kw_only=True)
class TileAssignment:
    """How a tensor is cut, and which devices hold which tile (the compiler's view of a sharding).

    Attributes:
        counts: tiles along each dimension of the tensor.
        devices: device numbers, tile by tile in row-major order; as many per tile as there are copies of it.
    """

    counts: tuple[int, ...]
    devices: tuple[int, ...]

    @property
    def number(self) -> int:
        """Different tiles."""
        return math.prod(self.counts)

    @property
    def copies(self) -> int:
        """Devices that hold the same tile."""
        return len(self.devices) // self.number


def op_sharding_arguments(tiles: TileAssignment) -> tuple[Any, ...]:
    """What the constructor of torch_xla's `OpSharding` takes: tiles, their order, the groups of copies, the kind."""
    if tiles.number == 1:
        return [], [], [], _REPLICATED
    tiled = np.array(tiles.devices)
    if tiles.copies == 1:
        return tiled.reshape(tiles.counts).tolist(), [], [], _TILED
    groups = tiled.reshape(tiles.number, tiles.copies).tolist()
    order = np.arange(tiles.number).reshape(tiles.counts).tolist()
    return tiled.reshape(*tiles.counts, tiles.copies).tolist(), order, groups, _PARTIAL


def tiles_from_text(text: str, rank: int) -> TileAssignment | None:
    """From XLA's notation: `{devices=[2,1,4]0,2,4,6,1,3,5,7 last_tile_dim_replicate}`, or `[2,4]<=[8]`."""
    match = re.match(r"\{devices=\[([\d,]+)\]([\d,]*)(?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?)?", text)
    if match is None:
        return None
    counts, listed, reshaped, order = ([int(n) for n in part.split(",")] if part else [] for part in match.groups())
    if not listed:
        iota = np.arange(math.prod(reshaped)).reshape(reshaped)
        listed = (iota.transpose(order) if order else iota).reshape(-1).tolist()
    return TileAssignment(counts=tuple(counts[:rank]), devices=tuple(listed))


def put_together(tensor: torch.Tensor, shards: Sequence[torch.Tensor], places: Sequence[Any]) -> torch.Tensor | None:
    """A copy of a cut tensor, put together on the host; None if other hosts hold parts of it.

    What torch_xla does instead compiles and executes, for each tensor, a graph that gathers it on every device.

    Args:
        tensor: for its shape and dtype.
        shards: on the host, one per device.
        places: for each shard which copy it is and the slices it takes (`...` for all).
    """
    if shards and shards[0].shape == tensor.shape:
        # A value that was copied in eagerly is not cut yet, whatever the annotation says.
        return shards[0]
    whole, copied = torch.empty(tensor.shape, dtype=tensor.dtype), 0
    for shard, (replica, indices) in zip(shards, places, strict=True):
        if replica == 0:
            part = whole if indices is ... else whole[tuple(indices)]
            part.copy_(shard[tuple(slice(0, size) for size in part.shape)])
            copied += part.numel()
    return whole if copied == whole.numel() else None


# ---- parts ----------------------------------------------------------------------------------------


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
