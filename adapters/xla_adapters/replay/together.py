"""`StepsTogether`: replayed passes that wait for each other, until one executable runs all of them.

Keras has had `steps_per_execution` since 2.4: there callbacks see the model only after each group. Here whoever uses a
tensor that waiting steps change has them executed first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from xla_adapters.backend import Backend
from xla_adapters.errors import DeviceOutOfMemoryError
from xla_adapters.interrupts import InterruptGuard, at_edge
from xla_adapters.packed_state import unpack
from xla_adapters.replay.foresight import Update
from xla_adapters.replay.number import Number
from xla_adapters.replay.own_buffers import copies_of_taken, give_own_buffers
from xla_adapters.replay.places import PassTensors, Place
from xla_adapters.replay.promised import PromisedTensor
from xla_adapters.replay.recording import Recording
from xla_adapters.step_scope import ScopeReport
from xla_adapters.waiting_steps import StateWatch, storage_of

if TYPE_CHECKING:
    from xla_adapters.backend.repeated_graphs import RepeatedGraph

logger = logging.getLogger("xla_adapters")


@dataclass
class Form:
    """What of a recording differs from pass to pass, and what is carried from one to the next.

    Attributes:
        varying: positions of inputs that each pass has its own of.
        carried: for each input that a pass changes, the output that the next one begins with.
        written: for each output that is written into a tensor in place, the places.
        rebound: for each output that attributes are bound to, the places.
        each: outputs wanted of each pass.
        replaceable: places that are read, and where other tensors may come to lie between two passes.
        several: the executable, when it was compiled.
        compiled: how many executables there were then.
    """

    varying: list[int]
    carried: dict[int, int]
    written: dict[int, list[Place]]
    rebound: dict[int, list[Place]]
    each: list[int]
    replaceable: list[Place]
    several: RepeatedGraph | None = None
    compiled: int = 0

    @classmethod
    def of(cls, recording: Recording) -> Form | str:
        """That of a recording; or why its passes cannot be executed together."""
        if not recording.graph:
            return "it was recorded without its graph"
        if recording.fresh_grads:
            return "gradients are left behind by each step; free_grads=True drops them in it"
        if any(place.kind == "state" for places in recording.targets for place in places):
            return "the optimizer sets its state to new tensors"
        by_key = {
            source.key: index
            for index, source in enumerate(recording.sources)
            if isinstance(source, Place) and source.kind != "batch"
        }
        varying = [
            index
            for index, source in enumerate(recording.sources)
            if source == "seed"
            or (isinstance(source, Place) and source.kind == "batch")
            or (isinstance(source, Number) and source.roles)
        ]
        carried: dict[int, int] = {}
        written: dict[int, list[Place]] = {}
        rebound: dict[int, list[Place]] = {}
        for output, places in enumerate(recording.targets):
            for place in places:
                if place.key in by_key:
                    carried[by_key[place.key]] = output
                binds = place.kind == "buffer" or place.key in recording.rebound
                (rebound if binds else written).setdefault(output, []).append(place)
        handed_out = {leaf for kept in recording.kept.values() for leaf in kept.leaves if isinstance(leaf, int)}
        ends = set(carried.values())
        each = sorted(handed_out | rebound.keys() | (written.keys() - ends))
        replaceable = [
            source
            for source in recording.sources
            if isinstance(source, Place) and source.kind not in ("batch", "tensor")
        ]
        return cls(varying, carried, written, rebound, each, replaceable)


@dataclass
class _Pass:
    """One that waits.

    Attributes:
        inputs: its own, by position; numbers are uploaded when it is executed.
        numbers: the values of those.
        handed_out: tensors that get a value when it is executed, and of which output.
    """

    inputs: dict[int, torch.Tensor]
    numbers: dict[int, float]
    handed_out: list[tuple[torch.Tensor, int]] = field(default_factory=list)


class StepsTogether:
    """The passes of one step that wait.

    Args:
        name: of the step, for messages.
        limit: how many are executed together.
        rolled: as a loop in the executable, or one behind the other.
        backend: the seam.
        note: is told why steps were executed before their time.
    """

    def __init__(self, name: str, limit: int, *, rolled: bool, backend: Backend, note: Callable[[str], object]) -> None:
        self._name = name
        self._limit = limit
        self._rolled = rolled
        self._backend = backend
        self._interrupts = InterruptGuard()
        self._passes: list[_Pass] = []
        self._state: set[int] = set()
        self._lies: dict[tuple[str, int, str | int], torch.Tensor] = {}
        self._told: set[str] = set()
        self._watch = StateWatch(self)
        self._note = note

    def takes(self, recording: Recording) -> bool:
        """Whether a pass may wait here; if not, what waits was executed."""
        if recording.form is None:
            recording.form = Form.of(recording)
            if isinstance(recording.form, str):
                reason = f"executed one by one: {recording.form}"
                self._note(reason)
                self._tell(f"its steps are {reason}")
        if self._passes and self._recording is not recording:
            self.settle("another graph follows")
        return not isinstance(recording.form, str)

    def add(
        self,
        recording: Recording,
        tensors: PassTensors,
        updates: Sequence[Update],
        promised: Sequence[tuple[torch.Tensor, int]],
    ) -> ScopeReport:
        """A pass waits; the last of a group has all of them executed.

        Args:
            recording: what to call.
            tensors: of the pass.
            updates: the host's part of the optimizers' updates.
            promised: tensors that the pass has handed out, and which outputs they are.
        """
        form = recording.form
        assert isinstance(form, Form)
        backend = self._backend
        if self._passes and any(place.get(tensors) is not self._lies[place.key] for place in form.replaceable):
            self.settle("a tensor that the step works on was replaced by another one")
        if self._passes and not self._state.isdisjoint(map(storage_of, tensors.batch)):
            self.settle("the batch is part of what they change")
        if self._passes:
            unpack(tensors.batch)
        else:
            recording.unpack(tensors)
            self._recording, self._form = recording, form
            self._start = self._beginning(recording, form, tensors)
            self._lies = {place.key: place.get(tensors) for place in form.replaceable}
            # The tensors, since others may lie in their places when they are written.
            self._written = [
                (place.get(tensors), output) for output, places in form.written.items() for place in places
            ]
            self._watch.begin()
            self._state = {storage_of(tensor) for tensor, _ in self._written}
            self._watch.storages = set(self._state)
        numbers = [number for update in updates for number in update.numbers]
        own: dict[int, torch.Tensor] = {}
        values: dict[int, float] = {}
        for index in form.varying:
            source = recording.sources[index]
            if isinstance(source, Number):
                values[index] = source.next(numbers)
            else:
                own[index] = source.get(tensors) if isinstance(source, Place) else backend.seed_input()
        waiting = _Pass(own, values, list(promised))
        for tensor, _ in promised:
            tensor.__class__ = torch.Tensor
        for output, places in form.rebound.items():
            stand_in = torch._to_functional_tensor(backend.inner(recording.outputs[output]))
            waiting.handed_out.append((stand_in, output))
            for place in places:
                if place.kind == "buffer":
                    place.owner._buffers[place.name] = stand_in
                else:
                    setattr(place.owner, str(place.name), stand_in)
                if place.key in self._lies:
                    self._lies[place.key] = stand_in
        # The batch, because whoever writes into it must wait for those who read it.
        self._watch.storages |= {storage_of(tensor) for tensor in tensors.batch}
        self._watch.storages |= {storage_of(tensor) for tensor, _ in waiting.handed_out}
        for leaf in recording.dropped_grads:
            leaf.grad = None
        for change in recording.host_changes:
            change.apply()
        for update in updates:
            update.advance()
        # Executed, and the inputs set to these numbers, before another pass is traced.
        recording.updates = list(updates)
        self._passes.append(waiting)
        if len(self._passes) < self._limit:
            return ScopeReport(compiles=0, compile_seconds=0.0)
        compiles, seconds = backend.compile_totals()
        self._execute(together=True)
        after, seconds_after = backend.compile_totals()
        return ScopeReport(compiles=after - compiles, compile_seconds=seconds_after - seconds)

    def settle(self, why: str) -> None:
        """Executes what waits, one by one.

        Args:
            why: what needs it, in words.
        """
        count = len(self._passes)
        reason = f"executed before their time: {why}"
        self._note(reason)
        self._tell(f"{count} steps are {reason}")
        self._execute(together=False)

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            logger.info("%s: steps_per_execution=%d: %s", self._name, self._limit, text)

    @staticmethod
    def _beginning(recording: Recording, form: Form, tensors: PassTensors) -> dict[int, torch.Tensor]:
        own = set(form.varying)
        return {
            index: source.value if isinstance(source, Number) else source.get(tensors)
            for index, source in enumerate(recording.sources)
            if index not in own and isinstance(source, (Number, Place))
        }

    # ---- execution ---------------------------------------------------------------------------------

    @at_edge
    def _execute(self, *, together: bool) -> None:
        self._interrupts.install()
        try:
            passes, self._passes = self._passes, []
            self._watch.end()
            with torch.no_grad(), torch._C.DisableTorchFunction():
                self._upload(passes)
                self._backend.flush()
                try:
                    results = self._in_one(passes) if together else self._one_by_one(passes)
                except RuntimeError as error:
                    for item in passes:
                        for tensor, _ in item.handed_out:
                            tensor.__class__ = PromisedTensor
                    if self._backend.is_out_of_memory(error):
                        raise DeviceOutOfMemoryError.of_step(self._name, self._backend.hardware()) from error
                    raise
                self._hand_out(passes, results)
        finally:
            self._interrupts.finish()

    def _upload(self, passes: list[_Pass]) -> None:
        sources = self._recording.sources
        wanted = [(item, index, value) for item in passes for index, value in item.numbers.items()]
        numbers = [(value, _number(sources[index]).value.dtype) for _, index, value in wanted]
        uploads = self._backend.upload_numbers(numbers)
        for (item, index, value), upload in zip(wanted, uploads, strict=True):
            item.inputs[index] = upload
            number = _number(sources[index])
            number.value, number.present = upload, value

    def _own_buffers(self, passes: list[_Pass]) -> None:
        taken = [self._start[index] for index in self._recording.donated]
        shared = self._backend.shared(taken)
        if shared:
            give_own_buffers([taken[position] for position in shared], self._backend)
        # Whoever is given as the batch may be the state by another name.
        for item in passes:
            like = self._recording.taken_like(item.inputs.values(), self._start)
            item.inputs.update(copies_of_taken(like, item.inputs, self._backend))

    def _in_one(self, passes: list[_Pass]) -> dict[tuple[int, int | None], torch.Tensor]:
        backend, recording, form = self._backend, self._recording, self._form
        lost = backend.executables_compiled() - form.compiled > backend.executables_kept() // 2
        donated = recording.donated
        self._own_buffers(passes)
        if form.several is None or lost:
            first = {**self._start, **passes[0].inputs}
            form.several = backend.compile_repeated(
                recording.graph,
                [first[index] for index in range(len(recording.sources))],
                varying=form.varying,
                carried=form.carried,
                each=form.each,
                donated=donated,
                runs=len(passes),
                rolled=self._rolled,
            )
        several = form.several
        inputs = [self._start[index] if run is None else passes[run].inputs[index] for index, run in several.order]
        taken = [backend.snapshot(self._start[index]) for index in donated]
        results = backend.run_graph(several.name, inputs, taken=taken)
        form.compiled = backend.executables_compiled()
        return dict(zip(several.results, results, strict=True))

    def _one_by_one(self, passes: list[_Pass]) -> dict[tuple[int, int | None], torch.Tensor]:
        backend, recording, form = self._backend, self._recording, self._form
        state = dict(self._start)
        self._own_buffers(passes)
        found: dict[tuple[int, int | None], torch.Tensor] = {}
        for run, item in enumerate(passes):
            given = {**state, **item.inputs}
            inputs = [given[index] for index in range(len(recording.sources))]
            taken = [backend.snapshot(inputs[index]) for index in recording.donated]
            outputs = backend.run_graph(recording.executable, inputs, taken=taken)
            for index, output in form.carried.items():
                state[index] = found[output, None] = outputs[output]
            found.update({(output, run): outputs[output] for output in form.each})
        recording.compiled = backend.executables_compiled()
        return found

    def _hand_out(self, passes: list[_Pass], results: dict[tuple[int, int | None], torch.Tensor]) -> None:
        form, backend, recording = self._form, self._backend, self._recording
        last = len(passes) - 1
        final = {
            output: results[output, last] if (output, last) in results else results[output, None]
            for output in {*form.each, *form.carried.values()}
        }
        tensors = [tensor for tensor, _ in self._written]
        backend.write(tensors, [final[output] for _, output in self._written])
        backend.forget_writes(tensors)
        for run, item in enumerate(passes):
            for tensor, output in item.handed_out:
                backend.write([tensor], [results[output, run]])
        recording.outputs.update({output: final[output] for output in recording.outputs if output in final})


def _number(source: Place | str | Number) -> Number:
    assert isinstance(source, Number)
    return source
