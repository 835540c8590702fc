"""`PendingGraph`: all that a traced step leaves to be computed, as one call of an executable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from xla_adapters.backend import Backend
from xla_adapters.replay.bound import BoundState
from xla_adapters.replay.errors import CannotReplay
from xla_adapters.replay.places import PassTensors, Place
from xla_adapters.rollback import StepJournal, TensorEntry


def written_places(
    journal: StepJournal, tensors: PassTensors, bound: BoundState
) -> Iterator[tuple[Place, TensorEntry]]:
    """Where the tensors lie that the step may have written in place, without buffers that it binds anew.

    Args:
        journal: of the step.
        tensors: of the pass.
        bound: the attributes that the step may bind anew, as they were before it.
    """
    extras = {id(tensor): index for index, tensor in enumerate(tensors.extras)}
    grads = {id(before): leaf for leaf, before in journal.leaves() if before is not None}
    attributes = {id(tensor): Place("bound", owner, name) for owner, name, tensor in bound.tensors()}
    rebound = {id(before) for _, _, before in journal.rebound_buffers()}
    for entry in journal.entries():
        tensor = entry.tensor
        if id(tensor) in extras:
            yield Place("extra", name=extras[id(tensor)]), entry
        elif id(tensor) in grads:
            yield Place("grad", owner=grads[id(tensor)]), entry
        elif id(tensor) in attributes:
            yield attributes[id(tensor)], entry
        elif id(tensor) not in rebound:
            yield Place("tensor", owner=tensor), entry


class PendingGraph:
    """The pending graph: what it computes and reads, and which inputs' buffers it may reuse.

    The executables of `run` are never those of the backend's own sync, be the graph the same.

    Args:
        backend: the seam.
        written: the places whose tensors the step wrote, with what they were.
        near: tensors that may be pending; all there are, if these are not enough.

    Attributes:
        live: the tensors on the device that were looked at.
        pending: those of them that are not computed, aliases too.
        outputs: one for each value.
        numbers: their tensors' numbers.
        inputs: in the order of the graph's parameters.
        donors: by position among the inputs.

    Raises:
        CannotReplay: nothing is pending, or values that no Python code can reach.
    """

    def __init__(
        self, backend: Backend, written: Iterable[tuple[Place, TensorEntry]], near: Iterable[torch.Tensor] = ()
    ) -> None:
        self._backend = backend
        self.live: list[torch.Tensor] = list(near)
        total = backend.pending_count()
        if not total:
            raise CannotReplay("the step computes nothing")
        outputs = self._look() if self.live else {}
        if len(outputs) < total:
            # Once: it looks at every object there is.
            self.live = backend.live_tensors()
            outputs = self._look()
            # Looking may have brought views up to date.
            hidden = backend.pending_count() - len(outputs)
            if hidden:
                raise CannotReplay(
                    f"{hidden} intermediate values are kept alive behind the step (by an autograd graph?)"
                )
        self.numbers = sorted(outputs)
        self.outputs = [outputs[number] for number in self.numbers]
        # Before an execution has begun, its results are known by other handles than afterwards.
        backend.wait()
        self.inputs = backend.graph_inputs(self.outputs)
        given_up = {}
        for place, entry in written:
            if (
                place.holds(entry.tensor)
                and backend.is_pending(entry.tensor)
                # Written through an alias (`data`, say) it may be that the former value itself was written.
                and not backend.is_pending(entry.former)
            ):
                (handle,) = backend.handles([entry.former])
                given_up[handle, backend.tensor_number(entry.former)] = entry.former
        self.donors = {
            index: given_up[item.handle, item.number]
            for index, item in enumerate(self.inputs)
            if (item.handle, item.number) in given_up
        }

    def _look(self) -> dict[int, torch.Tensor]:
        backend = self._backend
        self.pending = [
            tensor for tensor in self.live if torch._is_functional_tensor(tensor) and backend.is_pending(tensor)
        ]
        outputs: dict[int, torch.Tensor] = {}
        for tensor in self.pending:
            torch._sync(tensor)  # type: ignore[attr-defined,no-untyped-call]
            outputs[backend.tensor_number(tensor)] = backend.inner(tensor)
        return outputs

    @property
    def feed(self) -> list[torch.Tensor]:
        """What the graph reads in this pass."""
        return [item.value for item in self.inputs]

    @property
    def name(self) -> bytes:
        """Of the executable that `run` calls."""
        return self._backend.executable_name(self.outputs, list(self.donors.values()))

    def run(self) -> tuple[bytes, list[torch.Tensor]]:
        """Executes the graph, and compiles it if it is new; returns the executable's name and the outputs."""
        name = self._backend.compile_graph(self.outputs, list(self.donors.values()))
        results = self._backend.run_graph(name, self.feed, taken=list(self.donors.values()))
        self._backend.fill(self.outputs, results)
        self._backend.finish_replayed()
        return name, results
