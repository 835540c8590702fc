"""`LazyStepCapture`: takes the graphs of steps from torch_xla's lazy tensors."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from xla_adapters.hlo.annotations import annotate, sharding
from xla_adapters.runtime import Runtime, TileAssignment
from xla_adapters.sharding import Placement, ShardingPlan
from xla_adapters.tools.step_capture import AbstractTransfers, Delegate, StepCapture, TracedStep, named_tensors
from xla_adapters.tracing.step_scope import StepScope, current_scope
from xla_adapters.tracing.undo_log import UndoLog


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


class LazyStepCapture(StepCapture):
    """`StepCapture` on torch_xla: lowers what is pending at the end of a step."""

    def __init__(self) -> None:
        super().__init__()
        self._shardings: Shardings
        # Of all that was copied, by handles on the device.
        self._on_device: dict[int, str] = {}

    def _abstract(self, stack: ExitStack) -> Runtime:
        runtime = self._runtime
        self._shardings = Shardings(runtime)
        return runtime.with_parts(
            transfers=AbstractTransfers(runtime.transfers, self._shardings),
            tracing=_AbstractTracing(runtime.tracing, self._finish_step),
            spmd=_AbstractSpmd(runtime.spmd, self._shardings),
            is_abstract=True,
        )

    def _placeholder(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._shardings.make(shape, dtype)

    def _name_on_device(self, tensor: torch.Tensor, name: str) -> None:
        self._on_device[self._handle(tensor)] = name

    def _replacements(self) -> list[tuple[Any, str, Callable[[Any], Any]]]:
        return [(torch.Tensor, "to", self._to), (Placement, "__init__", self._init_placement)]

    def _to(self, to: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            copied = self._copied(tensor, *args, **kwargs)
            return to(tensor, *args, **kwargs) if copied is None else copied

        return moved

    def _init_placement(self, init: Callable[..., None]) -> Callable[..., None]:
        def init_placement(placement: Placement, plan: ShardingPlan, runtime: Runtime | None = None) -> None:
            self.plan = plan
            init(placement, plan, runtime)

        return init_placement

    # ---- the graph of a step ---------------------------------------------------------------------

    def _finish_step(self) -> None:
        scope = current_scope()
        outputs: dict[int, torch.Tensor] = {}
        for tensor in self._runtime.tracing.live_tensors():
            if self._runtime.tracing.is_pending(tensor):
                outputs.setdefault(self._runtime.lazy.tensor_number(tensor), tensor)
        if scope is None or not outputs:
            return
        # In the order in which a sync takes them.
        outputs = dict(sorted(outputs.items()))
        undo_log = scope.undo_logs()[-1]
        updates = bool(undo_log.optimizers())
        tiles = self._take(scope, undo_log, outputs, self._kind(scope, updates=updates))
        self._end_if_taken(updates=updates)
        # The results, as placeholders: a micro batch is done.
        values = [
            self._shardings.make(tensor.shape, tensor.dtype, tiles.get(number)) for number, tensor in outputs.items()
        ]
        # Kernels in C++ (batch_norm) hold some results without the wrapper.
        inner = [
            self._runtime.lazy.inner(item) if torch._is_functional_tensor(item) else item for item in outputs.values()
        ]
        self._runtime.lazy.fill(inner, values)

    def _take(
        self, scope: StepScope, undo_log: UndoLog, outputs: Mapping[int, torch.Tensor], kind: str
    ) -> dict[int, TileAssignment | None]:
        """Lowers the graph, unless it is known; returns how its results are cut, by number, where that is known."""
        runtime, shardings = self._runtime, self._shardings
        inputs = shardings.all()
        before = {runtime.lazy.tensor_number(entry.tensor): entry.before_step for entry in undo_log.entries()}
        before = {number: value for number, value in before.items() if number in outputs}
        held = {number: self._handle(value) for number, value in before.items()}
        inputs |= {held[number]: value for number, value in before.items()}
        tiles = {
            number: shardings.of(inputs[handle]) for number, handle in held.items() if shardings.knows(inputs[handle])
        }
        updated = dict(tiles)
        for leaf, _ in undo_log.leaves():
            if leaf.grad is not None and runtime.tracing.is_pending(leaf.grad):
                # The compiler cuts a new gradient as its parameter.
                tiles[runtime.lazy.tensor_number(leaf.grad)] = _tiles_of_leaf(leaf, undo_log, shardings)
        graph = runtime.tracing.graph_hash(list(outputs.values()))
        if graph in self._graphs:
            return tiles
        self._graphs.add(graph)
        module, numbers = runtime.abstract.lower(list(outputs.values()), list(inputs.values()))
        places = {handle: number for handle, number in zip(inputs, numbers, strict=True) if number is not None}
        annotated = annotate(
            module,
            {number: _encoded(shardings.of(inputs[h])) for h, number in places.items() if shardings.knows(inputs[h])},
            {position: _encoded(tiles[number]) for position, number in enumerate(outputs) if updated.get(number)},
            {places[handle] for handle in held.values() if handle in places},
        )
        names = self._named(undo_log, inputs)
        self.steps.append(
            TracedStep(
                module=annotated,
                names={number: names[handle] for handle, number in places.items() if handle in names},
                seconds=time.monotonic() - self._began,
                kind=kind,
                argument_bytes=sum(_bytes(inputs[handle], shardings) for handle in places),
                batch=self._batch,
            )
        )
        return tiles

    # ---- names -----------------------------------------------------------------------------------

    def _named(self, undo_log: UndoLog, inputs: Mapping[int, torch.Tensor]) -> dict[int, str]:
        """Names of inputs by their handles."""
        values = {id(entry.tensor): self._handle(entry.before_step) for entry in undo_log.entries()}
        names = {made: name for made, name in self._on_device.items() if made in inputs}
        for tensor, name in named_tensors(undo_log, self._runtime):
            names[values.get(id(tensor)) or self._handle(tensor)] = name
        return names

    def _handle(self, tensor: torch.Tensor) -> int:
        """The handle of a value; 0 of one that is still to be computed."""
        return 0 if self._runtime.tracing.is_pending(tensor) else self._runtime.lazy.handles([tensor])[0]


def _tiles_of_leaf(leaf: torch.Tensor, undo_log: UndoLog, shardings: Shardings) -> TileAssignment | None:
    """How a parameter is cut, also one that the step has updated."""
    value = next((entry.before_step for entry in undo_log.entries() if entry.tensor is leaf), leaf)
    return shardings.of(value) if shardings.knows(value) else None


def _bytes(tensor: torch.Tensor, shardings: Shardings) -> int:
    """On one device."""
    tiles = shardings.of(tensor) if shardings.knows(tensor) else None
    counts = tiles.counts if tiles is not None else (1,) * tensor.ndim
    sizes = (-(-size // count) for size, count in zip(tensor.shape, counts, strict=True))
    return math.prod(sizes) * tensor.element_size()


def _encoded(tiles: TileAssignment | None) -> bytes:
    """As an OpSharding; empty if the tensor is whole on each device."""
    return b"" if tiles is None else sharding(tiles.counts, tiles.devices)
