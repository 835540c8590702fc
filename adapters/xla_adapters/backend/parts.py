"""`Part`: what one device holds of a cut tensor; and how parts come to the host and to the devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from xla_adapters.backend.tiles import Tiles, op_sharding_arguments


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


class PartTransfers:
    """Copies of cut tensors that never are in one piece, on torch_xla's private calls.

    Attributes:
        native: the module of these calls.
    """

    native: Any

    def is_pending(self, tensor: torch.Tensor) -> bool:
        """As the seam has it."""
        raise NotImplementedError

    def flush(self) -> None:
        """As the seam has it."""
        raise NotImplementedError

    def wait(self) -> None:
        """As the seam has it."""
        raise NotImplementedError

    def tiles_of(self, tensor: torch.Tensor) -> Tiles | None:
        """As the seam has it."""
        raise NotImplementedError

    def local_parts(self, tensor: torch.Tensor) -> list[Part]:
        """What each device of this process holds of a cut tensor; nothing if every device holds it whole."""
        if self.tiles_of(tensor) is None:
            return []
        places = self.native._get_local_shard_replica_and_indices([tensor.detach()])[0]
        return [
            Part(offsets=tuple(s.start for s in slices), sizes=tuple(s.stop - s.start for s in slices))
            for _, slices in places
        ]

    def parts_to_host(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Copies of what `local_parts` lists, in its order."""
        if self.is_pending(tensor):
            self.flush()
        self.wait()
        shards = [shard for shard, _ in self.native._get_local_shards([tensor.detach()])[0]]
        parts = self.local_parts(tensor)
        if shards and shards[0].shape == tensor.shape:
            # A value that was copied in eagerly is not cut yet, whatever the annotation says.
            return [shards[0][part.slices].clone() for part in parts]
        return [part.without_padding(shard) for part, shard in zip(parts, shards, strict=True)]

    def upload_parts(self, parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """A tensor cut as `like`, from what `local_parts` lists of it: each device gets its part only."""
        tiles = self.tiles_of(like)
        assert tiles is not None
        sizes = [-(-size // count) for size, count in zip(like.shape, tiles.counts, strict=True)]
        buffers = [part.with_padding(values, sizes) for part, values in zip(self.local_parts(like), parts, strict=True)]
        sharding = self.native.OpSharding(*op_sharding_arguments(tiles))
        result: torch.Tensor = self.native._global_tensor_from_cpu_shards(buffers, sharding, list(like.shape))
        return result
