"""`abstract_runtime`: the runtime with tensors that have no memory, so that steps of any size can be traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch

from xla_adapters.runtime import Runtime, TileAssignment
from xla_adapters.runtime.interface import Spmd, Tracing, Transfers
from xla_adapters.runtime.transfers import note_upload


class Shardings:
    """How placeholders are cut. torch_xla annotates tensors with a value only.

    Args:
        runtime: makes the placeholders.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        # With the placeholders, so that no other gets the same handle.
        self._made: dict[int, tuple[torch.Tensor, TileAssignment | None]] = {}

    def make(self, shape: Sequence[int], dtype: torch.dtype, tiles: TileAssignment | None = None) -> torch.Tensor:
        """A new placeholder that is cut so."""
        tensor = self._runtime.abstract.placeholder(shape, dtype)
        # As it is now: a step gives `tensor` another value.
        self._made[self._handle(tensor)] = (self._runtime.values.snapshot(tensor), tiles)
        return tensor

    def all(self) -> dict[int, torch.Tensor]:
        """All placeholders, by the handles of their buffers."""
        return {handle: tensor for handle, (tensor, _) in self._made.items()}

    def cut(self, tensor: torch.Tensor, tiles: TileAssignment) -> bool:
        """Notes how a placeholder is cut; False if it is none."""
        handle = self._handle(tensor)
        if handle in self._made:
            self._made[handle] = (self._made[handle][0], tiles)
        return handle in self._made

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is a placeholder."""
        return self._handle(tensor) in self._made

    def of(self, tensor: torch.Tensor) -> TileAssignment | None:
        """How a placeholder is cut; None if nobody said so."""
        return self._made[self._handle(tensor)][1]

    def _handle(self, tensor: torch.Tensor) -> int:
        """0 of a tensor that is still to be computed."""
        if self._runtime.tracing.is_pending(tensor):
            return 0
        return self._runtime.lazy.handles([tensor])[0]


class Abstract(Protocol):
    """Makes tensors without memory, and knows them."""

    def make(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new one."""

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is one."""


class Delegate:
    """A part of the runtime some of whose methods are replaced in subclasses.

    Args:
        part: of the runtime.
    """

    def __init__(self, part: Any) -> None:
        self._part = part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


class AbstractTransfers(Delegate):
    """`Transfers` whose copies on the device have no memory, except those of single numbers.

    Args:
        part: of the runtime.
        abstract: makes them.
    """

    def __init__(self, part: Any, abstract: Abstract) -> None:
        super().__init__(part)
        self._abstract = abstract

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Only single numbers are copied: steps read nothing else while they are traced."""
        if tensor.ndim == 0 and tensor.device.type != "meta":
            copy: torch.Tensor = self._part.to_device(tensor)
            return copy
        made = self._abstract.make(tensor.shape, tensor.dtype)
        if tensor.device.type == "cpu":
            # What the batch alone determines (the largest label, say) is computed on the host, as in a training.
            note_upload(tensor, made)
        return made

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Placeholders are zeros there: what reads them knows that values do not matter (buffers sent to a process)."""
        real = [tensor for tensor in tensors if not self._abstract.knows(tensor)]
        copies = iter(self._part.to_host(real))
        return [
            torch.zeros(tensor.shape, dtype=tensor.dtype) if self._abstract.knows(tensor) else next(copies)
            for tensor in tensors
        ]


class _AbstractSpmd(Delegate):
    def __init__(self, part: Any, shardings: Shardings) -> None:
        super().__init__(part)
        self._shardings = shardings

    def shard(self, tensor: torch.Tensor, tiles: TileAssignment) -> None:
        if not self._shardings.cut(tensor, tiles):
            self._part.shard(tensor, tiles)

    def annotate_whole(self, tensor: torch.Tensor) -> None:
        if not self._shardings.knows(tensor):
            self._part.annotate_whole(tensor)
        elif self._shardings.of(tensor) is None:
            self._shardings.cut(tensor, TileAssignment(counts=(1,) * tensor.ndim, devices=(0,)))

    def tiles_of(self, tensor: torch.Tensor) -> TileAssignment | None:
        if not self._shardings.knows(tensor):
            found: TileAssignment | None = self._part.tiles_of(tensor)
            return found
        tiles = self._shardings.of(tensor)
        return tiles if tiles is not None and tiles.number > 1 else None

    def upload_sharded(self, tensor: torch.Tensor, tiles: TileAssignment) -> torch.Tensor:
        return self._shardings.make(tensor.shape, tensor.dtype, tiles)


class _AbstractTracing(Delegate):
    def __init__(self, part: Any, finish_step: Callable[[], None]) -> None:
        super().__init__(part)
        self._finish_step = finish_step

    def finish_step(self) -> None:
        self._finish_step()


def abstract_runtime(runtime: Runtime, *, finish_step: Callable[[], None] | None = None) -> tuple[Runtime, Shardings]:
    """The runtime, with copies to the device replaced by placeholders; and how those are cut.

    Args:
        runtime: the runtime.
        finish_step: is called in place of executing the graph of a step.
    """
    shardings = Shardings(runtime)
    tracing = runtime.tracing
    if finish_step is not None:
        tracing = cast(Tracing, _AbstractTracing(tracing, finish_step))
    changed = Runtime(
        name=runtime.name,
        dynamo_backend=runtime.dynamo_backend,
        device=runtime.device,
        transfers=cast(Transfers, AbstractTransfers(runtime.transfers, shardings)),
        tracing=tracing,
        values=runtime.values,
        executables=runtime.executables,
        random=runtime.random,
        counters=runtime.counters,
        why_no_replay=lambda _: None,
        spmd=cast(Spmd, _AbstractSpmd(runtime.spmd, shardings)),
        lazy=runtime.lazy,
        shared_buffers=runtime.shared_buffers if runtime.has_shared_buffers else None,
        custom_kernels=runtime.custom_kernels if runtime.has_custom_kernels else None,
        abstract=runtime.abstract,
        is_abstract=True,
    )
    return changed, shardings
