"""`ShardedTensors`: the part of the seam that cuts tensors over the devices, and moves their parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch_xla
from torch_xla.distributed.spmd import XLAShardedTensor

from xla_adapters.backend.parts import Part
from xla_adapters.backend.tiles import Tiles, op_sharding_arguments, tiles_from_text

if TYPE_CHECKING:
    from xla_adapters.backend.interface import Backend as _Rest
else:
    _Rest = object

_C = torch_xla._XLAC


class ShardedTensors(_Rest):
    """A part of `PJRTBackend`, on whose rest it relies."""

    def shard(self, tensor: torch.Tensor, tiles: Tiles) -> None:
        """Cuts a tensor that has a value (a parameter, a state, a batch); asked again it does nothing."""
        tensor = tensor.detach()
        text = _C._get_xla_sharding_spec(tensor)
        if text:
            present = tiles_from_text(text, tensor.ndim)
            # A value that was copied in from the host, eagerly, waits there under an annotation that is not its own.
            waits = "Tensor on host: with size" in _C._get_xla_tensor_debug_info(tensor)
            if not waits and (present == tiles or (present is None and tiles.number == 1)):
                return
            _C._xla_clear_sharding(tensor)
        _C._xla_mark_sharding(tensor, _op_sharding(tiles))

    def constrain(self, tensor: torch.Tensor, tiles: Tiles, *, gradient: Tiles | None = None) -> torch.Tensor:
        """The tensor, an intermediate value of the step, cut so; its gradient too, or as given."""
        back = _op_sharding(gradient if gradient is not None else tiles)
        result: torch.Tensor = _Constrained.apply(tensor, _op_sharding(tiles), back)  # type: ignore[no-untyped-call]
        return result

    def tiles_of(self, tensor: torch.Tensor) -> Tiles | None:
        """How a tensor is cut; None if nobody said, or if every device holds it whole."""
        return tiles_from_text(_C._get_xla_sharding_spec(tensor.detach()), tensor.ndim)

    def upload_sharded(self, tensor: torch.Tensor, tiles: Tiles) -> torch.Tensor:
        """A copy of a host tensor on the devices, each with its own part only."""
        spec = _C.XlaShardingSpec(tensor, *op_sharding_arguments(tiles), False)
        copy: torch.Tensor = _C._xla_tensors_from_aten([tensor.detach()], [str(self.device())], [spec])[0]
        return copy

    def plain(self, tensor: torch.Tensor) -> torch.Tensor:
        """The device tensor itself, if it is wrapped to show how it is cut (`xs.mark_sharding` does that)."""
        return tensor.global_tensor if isinstance(tensor, XLAShardedTensor) else tensor

    @contextmanager
    def gathering_on_host(self) -> Iterator[None]:
        """Lets torch_xla's own saving (`xm.save`) put cut tensors together as `to_host` does, until the exit."""
        before = _C._xla_get_cpu_tensors
        _C._xla_get_cpu_tensors = self.to_host
        try:
            yield
        finally:
            _C._xla_get_cpu_tensors = before

    # ---- parts, never in one piece ---------------------------------------------------------------

    def local_parts(self, tensor: torch.Tensor) -> list[Part]:
        """What each device of this process holds of a cut tensor; nothing if every device holds it whole."""
        if self.tiles_of(tensor) is None:
            return []
        # torch_xla looks at the value, and fails while that is computed.
        if self.is_pending(tensor):
            self.flush()
        self.wait()
        places = _C._get_local_shard_replica_and_indices([tensor.detach()])[0]
        return [
            Part(offsets=tuple(s.start for s in slices), sizes=tuple(s.stop - s.start for s in slices))
            for _, slices in places
        ]

    def parts_to_host(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Copies of what `local_parts` lists, in its order."""
        parts = self.local_parts(tensor)
        shards = [shard for shard, _ in _C._get_local_shards([tensor.detach()])[0]]
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
        sharding = _op_sharding(tiles)
        result: torch.Tensor = _C._global_tensor_from_cpu_shards(buffers, sharding, list(like.shape))
        return result


class _Constrained(torch.autograd.Function):
    """As `torch_xla.distributed.spmd.mark_sharding_with_gradients`, without writing and parsing the mesh as text."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, sharding: Any, gradient: Any) -> torch.Tensor:
        ctx.sharding = gradient
        result = tensor.clone()
        # Beside the annotation that a parameter has, and its clone with it.
        _C._xla_annotate_custom_sharding(result, sharding)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        result = grads[0].clone()
        _C._xla_annotate_custom_sharding(result, ctx.sharding)
        return result, None, None


def _op_sharding(tiles: Tiles) -> Any:
    return _C.OpSharding(*op_sharding_arguments(tiles))
