"""`ExecutableScope`: a traced call that runs the executable which replays of the step would run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from xla_adapters.replay.attribute_changes import AttributesBefore
from xla_adapters.replay.call_spec import CallSpec
from xla_adapters.replay.pending_graph import PendingGraph, written_places
from xla_adapters.replay.tensor_places import CannotReplay
from xla_adapters.tracing.optimizers import needs_no_recording
from xla_adapters.tracing.step_scope import StepScope


class SeparatingScope(StepScope):
    """A `StepScope` in which optimizers' updates share no input with the rest of the graph.

    Python numbers that are equal share one input of the graph. In a replay they may differ, so those of an update are
    kept apart. A step that cannot be replayed keeps this scope, so that its graph stays the same.

    Args:
        spec: describes the call.
        **options: as for `StepScope`.
    """

    def __init__(self, spec: CallSpec, **options: Any) -> None:
        super().__init__(**options)
        self._spec = spec
        self._returned: dict[str, Any] = {}
        self._separates = False

    def keep(self, name: str, value: Any) -> None:
        """Notes a value that the step returns, under a name."""
        self._returned[name] = value

    def update_begins(self, optimizer: Optimizer) -> None:
        """Lets the numbers of the update have inputs of their own, unless they have them in updates of lists."""
        if not needs_no_recording(optimizer):
            self.on_torchs_update()

    def on_torchs_update(self) -> None:
        """See `StepScope`."""
        self._separates = True
        with torch._C.DisableTorchFunction():
            self._runtime.lazy.separate_scalars()

    def update_ended(self, optimizer: Optimizer) -> None:
        """Lets the numbers after the update have inputs of their own."""
        if self._separates:
            self._separates = False
            with torch._C.DisableTorchFunction():
                self._runtime.lazy.separate_scalars()


class ExecutableScope(SeparatingScope):
    """A `SeparatingScope` that executes its graph by an executable that can be run again.

    A sync would compile the same graph a second time, because the runtime knows the two by different names. So a step
    that was executed this way once is always executed this way, even if it cannot be replayed.

    Args:
        spec: describes the call.
        **options: as for `StepScope`.
    """

    def _start_tracing(self) -> None:
        self._runtime.device.initialize()
        # Also if nothing is pending: it detects tensors that share a buffer.
        self._runtime.tracing.flush()
        self._attributes_before = AttributesBefore(self._spec.owners())
        super()._start_tracing()
        self._stream = self._runtime.random.seed()

    def _execute(self) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            try:
                graph = self._pending(self._near())
            except CannotReplay:
                super()._execute()
                return
            # Tracing has advanced the seed. The next step continues from the seed at the beginning of this one.
            self._runtime.random.set_seed(self._stream)
            graph.run(self._look_at(graph))

    def _look_at(self, graph: PendingGraph) -> Callable[[bytes], None]:
        """Notes what the graph is when it is compiled and not executed yet."""

        def look(name: bytes) -> None:
            donated = list(graph.donors.values())
            self._graph = self.history.analyses.executable(name, graph.outputs, donated, self._undo_log, self._runtime)

        return look

    def _pending(self, near: Iterator[torch.Tensor]) -> PendingGraph:
        if self._breaks.flushed:
            raise CannotReplay("a part of the step was executed before its end")
        return PendingGraph(
            self._runtime, written_places(self._undo_log, self._spec.tensors, self._attributes_before), near
        )

    def _near(self) -> Iterator[torch.Tensor]:
        """The tensors that a step's results are usually stored in."""
        yield from (entry.tensor for entry in self._undo_log.entries())
        yield from (leaf.grad for leaf, _ in self._undo_log.leaves() if leaf.grad is not None)
        buffers = [module._buffers.get(name) for module, name, _ in self._undo_log.reassigned_buffers()]
        attributes = [owner.attributes() for owner in self._spec.owners()]
        found = tree_leaves((self._returned, buffers, attributes))
        yield from (leaf for leaf in found if isinstance(leaf, torch.Tensor))
