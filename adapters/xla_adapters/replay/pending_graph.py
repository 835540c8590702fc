"""`PendingGraph`: the graph that a traced step has built, as one call of an executable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from xla_adapters.replay.attribute_changes import AttributesBefore
from xla_adapters.replay.tensor_places import CallTensors, CannotReplay, TensorPlace
from xla_adapters.runtime import Runtime
from xla_adapters.tracing.undo_log import TensorEntry, UndoLog


def written_places(
    undo_log: UndoLog, tensors: CallTensors, attributes_before: AttributesBefore
) -> Iterator[tuple[TensorPlace, TensorEntry]]:
    """The places of the tensors that the step may have written in place, except for buffers that it assigns.

    Args:
        undo_log: the step's.
        tensors: of the call.
        attributes_before: the attributes that the step may set, as they were before it.
    """
    extras = {id(tensor): index for index, tensor in enumerate(tensors.extras)}
    grads = {id(before): leaf for leaf, before in undo_log.leaves() if before is not None}
    attributes = {
        id(tensor): TensorPlace("attribute", owner, name) for owner, name, tensor in attributes_before.tensors()
    }
    reassigned = {id(before) for _, _, before in undo_log.reassigned_buffers()}
    for entry in undo_log.entries():
        tensor = entry.tensor
        if id(tensor) in extras:
            yield TensorPlace("extra", name=extras[id(tensor)]), entry
        elif id(tensor) in grads:
            yield TensorPlace("grad", owner=grads[id(tensor)]), entry
        elif id(tensor) in attributes:
            yield attributes[id(tensor)], entry
        elif id(tensor) not in reassigned:
            yield TensorPlace("tensor", owner=tensor), entry


class PendingGraph:
    """The pending graph: what it computes and reads, and which inputs' buffers its executable may reuse.

    `run` compiles an executable of its own. A sync of the runtime compiles the same graph under another name.

    Args:
        runtime: the runtime.
        written: the places whose tensors the step wrote, with their values before it.
        near: tensors that are likely to be pending. If others are, all tensors of the process are searched.

    Attributes:
        live: the tensors on the device that were searched.
        pending: those of them that are not computed, including aliases.
        outputs: the outputs of the graph, one tensor for each value.
        numbers: their numbers (`LazyTensors.tensor_number`).
        inputs: in the order of the graph's parameters.
        donors: the tensors whose buffers may be reused, by position among the inputs.

    Raises:
        CannotReplay: nothing is pending, or a value is pending that no Python object refers to.
    """

    def __init__(
        self, runtime: Runtime, written: Iterable[tuple[TensorPlace, TensorEntry]], near: Iterable[torch.Tensor] = ()
    ) -> None:
        self._runtime = runtime
        self.live: list[torch.Tensor] = list(near)
        total = runtime.tracing.pending_count()
        if not total:
            raise CannotReplay("the step computes nothing")
        outputs = self._look() if self.live else {}
        if len(outputs) < total:
            # Only then: this visits every object of the process.
            self.live = runtime.tracing.live_tensors()
            outputs = self._look()
            # Again: looking at a tensor may have applied writes to its views.
            hidden = runtime.tracing.pending_count() - len(outputs)
            if hidden:
                raise CannotReplay(
                    f"{hidden} intermediate values are kept alive after the step (by an autograd graph?)"
                )
        self.numbers = sorted(outputs)
        self.outputs = [outputs[number] for number in self.numbers]
        # Handles of results change when their execution begins.
        runtime.device.wait()
        self.inputs = runtime.executables.inputs(self.outputs)
        given_up = {}
        for place, entry in written:
            if (
                # torch_xla keeps the buffer of a number that was uploaded, and gives it to the next one of that value.
                entry.before_step.ndim
                and place.holds(entry.tensor)
                and runtime.tracing.is_pending(entry.tensor)
                # A write through an alias (`data`) may have changed the value before the step itself.
                and not runtime.tracing.is_pending(entry.before_step)
            ):
                (handle,) = runtime.lazy.handles([entry.before_step])
                given_up[handle, runtime.lazy.tensor_number(entry.before_step)] = entry.before_step
        self.donors = {
            index: given_up[item.handle, item.number]
            for index, item in enumerate(self.inputs)
            if (item.handle, item.number) in given_up
        }

    def _look(self) -> dict[int, torch.Tensor]:
        runtime = self._runtime
        self.pending = [
            tensor for tensor in self.live if torch._is_functional_tensor(tensor) and runtime.tracing.is_pending(tensor)
        ]
        outputs: dict[int, torch.Tensor] = {}
        for tensor in self.pending:
            torch._sync(tensor)  # type: ignore[attr-defined,no-untyped-call]
            outputs[runtime.lazy.tensor_number(tensor)] = runtime.lazy.inner(tensor)
        return outputs

    def forget(self) -> None:
        """Lets go of all tensors. Values that are inputs of later graphs, too, would look as if user code held them."""
        self.live, self.pending, self.outputs, self.inputs, self.donors = [], [], [], [], {}

    @property
    def feed(self) -> list[torch.Tensor]:
        """The inputs' values in this call."""
        return [item.value for item in self.inputs]

    @property
    def name(self) -> bytes:
        """The name of the executable that `run` calls."""
        return self._runtime.executables.name(self.outputs, list(self.donors.values()))

    def run(self, compiled: Callable[[bytes], None]) -> tuple[bytes, list[torch.Tensor]]:
        """Executes the graph, after compiling it if it is new.

        Args:
            compiled: called with the executable's name before it is executed.

        Returns:
            The executable's name and the outputs.
        """
        name = self._runtime.executables.compile(self.outputs, list(self.donors.values()))
        compiled(name)
        results = self._runtime.executables.run(name, self.feed, taken=list(self.donors.values()))
        self._runtime.lazy.fill(self.outputs, results)
        self._runtime.executables.finish_run()
        return name, results
