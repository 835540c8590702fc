"""`CachedScope`: a traced pass that runs the executable which replays of the step would call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from xla_adapters.replay.bound import BoundState
from xla_adapters.replay.errors import CannotReplay
from xla_adapters.replay.pending import PendingGraph, written_places
from xla_adapters.replay.request import Request
from xla_adapters.step_scope import StepScope


class SeparatingScope(StepScope):
    """A `StepScope` in which optimizers' updates share no Python number with the rest of the graph.

    To be replayed they must not, since they may part; and a step that was tried so stays the same graph.

    Args:
        request: what is known of the pass.
        **options: as for `StepScope`.
    """

    def __init__(self, request: Request, **options: Any) -> None:
        super().__init__(**options)
        self._request = request
        self._kept: dict[str, Any] = {}

    def keep(self, name: str, value: Any) -> None:
        """Notes a value that the step hands out under a name."""
        self._kept[name] = value

    def update_begins(self, optimizer: Optimizer) -> None:
        """What went before has inputs of its own."""
        with torch._C.DisableTorchFunction():
            self._backend.separate_scalars()

    def update_ended(self, optimizer: Optimizer) -> None:
        """What follows has inputs of its own."""
        with torch._C.DisableTorchFunction():
            self._backend.separate_scalars()


class CachedScope(SeparatingScope):
    """A `SeparatingScope` whose graph is compiled so that it can be run again, and is run so at once.

    A sync would compile the same graph once more: the backend knows the two by different names. So a step that was
    executed so stays with it, whatever became of its replay.

    Args:
        request: what is known of the pass.
        **options: as for `StepScope`.
    """

    def __init__(self, request: Request, **options: Any) -> None:
        super().__init__(request, **options)
        self._was_cut = False

    def _start_tracing(self) -> None:
        self._backend.initialize()
        # Also where nothing is pending: tensors that share a buffer become known as such.
        self._backend.flush()
        self._bound = BoundState(self._request.bound())
        super()._start_tracing()
        self._stream = self._backend.seed()

    def flush(self) -> None:
        """As in `StepScope`; a pass that executes in its middle is no single call."""
        self._was_cut = True
        super().flush()

    def _execute(self) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            try:
                graph = self._pending(self._near())
            except CannotReplay:
                self._backend.finish_step()
                return
            # What was drawn while tracing moved the stream on, and the end of a step goes on from its beginning.
            self._backend.set_seed(self._stream)
            graph.run()

    def _pending(self, near: Iterator[torch.Tensor]) -> PendingGraph:
        if self._was_cut:
            raise CannotReplay("a part of the step was executed before its end")
        return PendingGraph(self._backend, written_places(self._journal, self._request.tensors, self._bound), near)

    def _near(self) -> Iterator[torch.Tensor]:
        """Where a step's results lie mostly."""
        yield from (entry.tensor for entry in self._journal.entries())
        yield from (leaf.grad for leaf, _ in self._journal.leaves() if leaf.grad is not None)
        buffers = [module._buffers.get(name) for module, name, _ in self._journal.rebound_buffers()]
        attributes = [owner.attributes() for owner in self._request.bound()]
        found = tree_leaves((self._kept, buffers, attributes))
        yield from (leaf for leaf in found if isinstance(leaf, torch.Tensor))
