"""`XLASpmd`: cuts tensors over the devices by torch_xla's sharding annotations, and moves their parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch_xla
from torch_xla.distributed.spmd import XLAShardedTensor

from xla_adapters.runtime.interface import Device, Tracing, Transfers
from xla_adapters.runtime.tile_assignment import Part, TileAssignment, op_sharding_arguments, tiles_from_text

_C = torch_xla._XLAC


class XLASpmd:
    """`Spmd` on torch_xla.

    Args:
        device: the virtual device that stands for all.
        tracing: executes what is pending before parts of it are read.
        transfers: puts cut tensors together on the host.
    """

    def __init__(self, device: Device, tracing: Tracing, transfers: Transfers) -> None:
        self._device = device
        self._tracing = tracing
        self._transfers = transfers

    @cached_property
    def _device_name(self) -> str:
        return str(self._device.torch_device())

    def shard(self, tensor: torch.Tensor, tiles: TileAssignment) -> None:
        """See `Spmd`."""
        tensor = tensor.detach()
        text = _C._get_xla_sharding_spec(tensor)
        if text:
            present = tiles_from_text(text, tensor.ndim)
            # A value that was copied in from the host, eagerly, waits there under an annotation that is not its own.
            waits = "Tensor on host: with size" in _C._get_xla_tensor_debug_info(tensor)
            if not waits and (present == tiles or (present is None and tiles.number == 1)):
                return
            _C._xla_clear_sharding(tensor)
        _C._xla_mark_sharding(tensor, op_sharding(tiles))

    def annotate_whole(self, tensor: torch.Tensor) -> None:
        """See `Spmd`."""
        tensor = tensor.detach()
        if not _C._get_xla_sharding_spec(tensor):
            _C._xla_mark_sharding(tensor, op_sharding(TileAssignment(counts=(1,) * tensor.ndim, devices=(0,))))

    def constrain(
        self, tensor: torch.Tensor, tiles: TileAssignment, *, gradient: TileAssignment | None = None
    ) -> torch.Tensor:
        """See `Spmd`."""
        back = op_sharding(gradient if gradient is not None else tiles)
        result: torch.Tensor = _Constrained.apply(tensor, op_sharding(tiles), back)  # type: ignore[no-untyped-call]
        return result

    def tiles_of(self, tensor: torch.Tensor) -> TileAssignment | None:
        """See `Spmd`."""
        return tiles_of(tensor)

    def layouts(self, tensors: Sequence[torch.Tensor]) -> list[str]:
        """See `Spmd`."""
        return list(_C._get_xla_sharding_specs(list(tensors)))

    def upload_sharded(self, tensor: torch.Tensor, tiles: TileAssignment) -> torch.Tensor:
        """See `Spmd`."""
        spec = _C.XlaShardingSpec(tensor, *op_sharding_arguments(tiles), False)
        copy: torch.Tensor = _C._xla_tensors_from_aten([tensor.detach()], [self._device_name], [spec])[0]
        return copy

    def plain(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Spmd`; `xs.mark_sharding` makes such wrappers."""
        return tensor.global_tensor if isinstance(tensor, XLAShardedTensor) else tensor

    @contextmanager
    def gathering_on_host(self) -> Iterator[None]:
        """See `Spmd`; torch_xla's own saving is `xm.save`."""
        before = _C._xla_get_cpu_tensors
        try:
            _C._xla_get_cpu_tensors = self._transfers.to_host
            yield
        finally:
            _C._xla_get_cpu_tensors = before

    # ---- parts, never in one piece ---------------------------------------------------------------

    def local_parts(self, tensor: torch.Tensor) -> list[Part]:
        """See `Spmd`."""
        if tiles_of(tensor) is None:
            return []
        # torch_xla looks at the value, and fails while that is computed.
        if self._tracing.is_pending(tensor):
            self._tracing.flush()
        self._device.wait()
        places = _C._get_local_shard_replica_and_indices([tensor.detach()])[0]
        return [
            Part(offsets=tuple(s.start for s in slices), sizes=tuple(s.stop - s.start for s in slices))
            for _, slices in places
        ]

    def parts_to_host(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """See `Spmd`."""
        parts = self.local_parts(tensor)
        shards = [shard for shard, _ in _C._get_local_shards([tensor.detach()])[0]]
        if shards and shards[0].shape == tensor.shape:
            # A value that was copied in eagerly is not cut yet, whatever the annotation says.
            return [shards[0][part.slices].clone() for part in parts]
        return [part.without_padding(shard) for part, shard in zip(parts, shards, strict=True)]

    def upload_parts(self, parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """See `Spmd`."""
        tiles = tiles_of(like)
        assert tiles is not None
        sizes = [-(-size // count) for size, count in zip(like.shape, tiles.counts, strict=True)]
        buffers = [part.with_padding(values, sizes) for part, values in zip(self.local_parts(like), parts, strict=True)]
        sharding = op_sharding(tiles)
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


# ---- annotations ----------------------------------------------------------------------------------


def tiles_of(tensor: torch.Tensor) -> TileAssignment | None:
    """How a tensor is cut; None if it is not annotated, or if every device holds it whole."""
    return tiles_from_text(_C._get_xla_sharding_spec(tensor.detach()), tensor.ndim)


def op_sharding(tiles: TileAssignment) -> Any:
    """The annotation as torch_xla's `OpSharding`."""
    return _C.OpSharding(*op_sharding_arguments(tiles))
