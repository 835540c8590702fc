"""`CallGroup`: collects replayed calls of a step until one executable runs all of them.

Keras has had `steps_per_execution` since 2.4. There, callbacks see the model only after each group. Here the collected
calls are executed as soon as any code uses a tensor that they change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch

from xla_adapters.errors import DeviceOutOfMemoryError
from xla_adapters.replay.cached_call import CachedCall
from xla_adapters.replay.multistep.group_layout import GroupLayout, layout_of
from xla_adapters.replay.number import Number
from xla_adapters.replay.optimizer_update import Update, numbers_of
from xla_adapters.replay.pending_output import PendingOutput
from xla_adapters.replay.prepared_call import PreparedCall
from xla_adapters.replay.slots import CallTensors, Slot
from xla_adapters.runtime import Runtime
from xla_adapters.runtime.waiting_steps import StateWatch, storage_of
from xla_adapters.tracing.interrupts import InterruptGuard, at_edge
from xla_adapters.tracing.own_buffers import copies_of_taken
from xla_adapters.tracing.scope_report import NOTHING_COMPILED, CompileMeter, ScopeReport

logger = logging.getLogger("xla_adapters")
# By position among the outputs of a single call, and by call; None for what the last call leaves.
_Results = dict[tuple[int, int | None], torch.Tensor]


@dataclass
class _WaitingCall:
    """One call of the group.

    Attributes:
        inputs: its own, by position; numbers are uploaded when it is executed.
        numbers: their values, by position.
        pending: tensors that get their value when it is executed, and which output that is.
    """

    inputs: dict[int, torch.Tensor]
    numbers: dict[int, float]
    pending: list[tuple[torch.Tensor, int]] = field(default_factory=list)


class CallGroup:
    """The calls of one step that wait to be executed together.

    Args:
        name: of the step, for messages.
        limit: how many calls are executed together.
        rolled: whether the executable is a loop over the calls; otherwise it holds the graph once for each of them.
        runtime: the runtime.
        note: called with the reason when calls are executed one by one.
    """

    def __init__(self, name: str, limit: int, *, rolled: bool, runtime: Runtime, note: Callable[[str], object]) -> None:
        self._name = name
        self._limit = limit
        self._rolled = rolled
        self._runtime = runtime
        self._interrupts = InterruptGuard()
        self._layouts: WeakKeyDictionary[CachedCall, GroupLayout | str] = WeakKeyDictionary()
        self._waiting: list[_WaitingCall] = []
        # Storages that the waiting calls change.
        self._changed: set[int] = set()
        self._replaceable: dict[tuple[str, int, str | int], torch.Tensor] = {}
        self._told: set[str] = set()
        self._watch = StateWatch(self)
        self._note = note

    def accepts(self, prepared: PreparedCall) -> bool:
        """Whether a call can wait in this group. Waiting calls of another graph are executed."""
        call = prepared.call
        layout = self._layouts.get(call)
        if layout is None:
            layout = self._layouts[call] = layout_of(call)
            if isinstance(layout, str):
                reason = f"executed one by one: {layout}"
                self._note(reason)
                self._tell(f"its steps are {reason}")
        if self._waiting and self._prepared is not prepared:
            self.settle("another graph follows")
        return not isinstance(layout, str)

    def add(
        self,
        prepared: PreparedCall,
        tensors: CallTensors,
        updates: Sequence[Update],
        pending: Sequence[tuple[torch.Tensor, int]],
    ) -> ScopeReport:
        """Adds a call that `accepts` has accepted. If it completes the group, all are executed.

        Args:
            prepared: what is called.
            tensors: of the call.
            updates: the optimizers' host math.
            pending: outputs that the call has returned as `PendingOutput`, with their positions.
        """
        call = prepared.call
        layout = self._layouts[call]
        assert isinstance(layout, GroupLayout)
        if self._waiting and any(slot.get(tensors) is not self._replaceable[slot.key] for slot in layout.replaceable):
            self.settle("a tensor that the step works on was replaced by another one")
        if self._waiting and not self._changed.isdisjoint(map(storage_of, tensors.batch)):
            self.settle("the batch is part of what they change")
        if not self._waiting:
            self._begin(prepared, layout, tensors)
        waiting = self._waiting_call(tensors, updates)
        waiting.pending.extend(pending)
        for tensor, _ in pending:
            tensor.__class__ = torch.Tensor
        self._rebind(waiting)
        # The batch too: code that writes into it must wait for the calls that read it.
        self._watch.storages |= {storage_of(tensor) for tensor in tensors.batch}
        self._watch.storages |= {storage_of(tensor) for tensor, _ in waiting.pending}
        for leaf in call.gradients.dropped:
            leaf.grad = None
        for attribute in call.host.attributes:
            attribute.apply()
        for update in updates:
            update.advance()
        # All waiting calls are executed, which uploads these numbers, before another call is traced.
        call.updates = list(updates)
        self._waiting.append(waiting)
        if len(self._waiting) < self._limit:
            return NOTHING_COMPILED
        meter = CompileMeter(self._runtime)
        self._execute(together=True)
        return meter.report(NOTHING_COMPILED.operations)

    def _begin(self, prepared: PreparedCall, layout: GroupLayout, tensors: CallTensors) -> None:
        """Starts a group: notes the inputs that its first call has."""
        self._prepared, self._layout = prepared, layout
        self._sources = prepared.call.values.sources
        varying = set(layout.varying)
        self._start = {
            index: source.value if isinstance(source, Number) else source.get(tensors)
            for index, source in enumerate(self._sources)
            if index not in varying and isinstance(source, (Number, Slot))
        }
        self._replaceable = {slot.key: slot.get(tensors) for slot in layout.replaceable}
        # The tensors themselves: user code may assign others to these slots before the group is executed.
        self._written = [(slot.get(tensors), output) for output, slots in layout.written.items() for slot in slots]
        self._watch.begin()
        self._changed = {storage_of(tensor) for tensor, _ in self._written}
        self._watch.storages = set(self._changed)

    def _waiting_call(self, tensors: CallTensors, updates: Sequence[Update]) -> _WaitingCall:
        numbers = numbers_of(updates)
        inputs: dict[int, torch.Tensor] = {}
        values: dict[int, float] = {}
        for index in self._layout.varying:
            source = self._sources[index]
            if isinstance(source, Number):
                values[index] = source.next(numbers)
            else:
                inputs[index] = source.get(tensors) if isinstance(source, Slot) else self._runtime.random.seed_input()
        return _WaitingCall(inputs, values)

    def _rebind(self, waiting: _WaitingCall) -> None:
        """Sets attributes that the call sets to new tensors; these get their values when it is executed."""
        for output, slots in self._layout.rebound.items():
            example = self._prepared.call.outputs[output]
            tensor = torch._to_functional_tensor(self._runtime.lazy.inner(example))
            waiting.pending.append((tensor, output))
            for slot in slots:
                if slot.kind == "buffer":
                    slot.owner._buffers[slot.name] = tensor
                else:
                    setattr(slot.owner, str(slot.name), tensor)
                if slot.key in self._replaceable:
                    self._replaceable[slot.key] = tensor

    def settle(self, why: str) -> None:
        """Executes the waiting calls, one by one.

        Args:
            why: what needs their results, in words.
        """
        count = len(self._waiting)
        reason = f"executed before their time: {why}"
        self._note(reason)
        self._tell(f"{count} steps are {reason}")
        self._execute(together=False)

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            logger.info("%s: steps_per_execution=%d: %s", self._name, self._limit, text)

    # ---- execution ---------------------------------------------------------------------------------

    @at_edge
    def _execute(self, *, together: bool) -> None:
        self._interrupts.install()
        try:
            calls, self._waiting = self._waiting, []
            self._watch.end()
            with torch.no_grad(), torch._C.DisableTorchFunction():
                self._upload(calls)
                self._runtime.tracing.flush()
                try:
                    results = self._in_one(calls) if together else self._one_by_one(calls)
                except RuntimeError as error:
                    for call in calls:
                        for tensor, _ in call.pending:
                            tensor.__class__ = PendingOutput
                    if self._runtime.device.is_out_of_memory(error):
                        raise DeviceOutOfMemoryError.of_step(self._name, self._runtime.device.hardware()) from error
                    raise
                self._write_back(calls, results)
        finally:
            self._interrupts.finish()

    def _upload(self, calls: list[_WaitingCall]) -> None:
        wanted = [(call, index, value) for call in calls for index, value in call.numbers.items()]
        numbers = [(value, _number(self._sources[index]).value.dtype) for _, index, value in wanted]
        uploads = self._runtime.transfers.upload_numbers(numbers)
        for (call, index, value), upload in zip(wanted, uploads, strict=True):
            call.inputs[index] = upload
            number = _number(self._sources[index])
            number.value, number.present = upload, value

    def _own_buffers(self, calls: list[_WaitingCall]) -> None:
        donated = self._prepared.call.values.donated
        self._prepared.separate([self._start[index] for index in donated], self._runtime)
        # A tensor of the batch may be one of the state.
        for call in calls:
            like = self._prepared.donated_like(call.inputs.values(), self._start)
            call.inputs.update(copies_of_taken(like, call.inputs, self._runtime))

    def _in_one(self, calls: list[_WaitingCall]) -> _Results:
        runtime, layout = self._runtime, self._layout
        lost = runtime.counters.executables_compiled() - layout.compiled > runtime.counters.executables_kept() // 2
        donated = self._prepared.call.values.donated
        self._own_buffers(calls)
        if layout.several is None or lost:
            first = {**self._start, **calls[0].inputs}
            layout.several = runtime.executables.compile_repeated(
                self._prepared.call.text,
                [first[index] for index in range(len(self._sources))],
                varying=layout.varying,
                carried=layout.carried,
                each=layout.each,
                donated=donated,
                runs=len(calls),
                rolled=self._rolled,
            )
        several = layout.several
        inputs = [self._start[index] if run is None else calls[run].inputs[index] for index, run in several.order]
        taken = [runtime.values.snapshot(self._start[index]) for index in donated]
        results = runtime.executables.run(several.name, inputs, taken=taken)
        layout.compiled = runtime.counters.executables_compiled()
        return dict(zip(several.results, results, strict=True))

    def _one_by_one(self, calls: list[_WaitingCall]) -> _Results:
        runtime, layout, cached = self._runtime, self._layout, self._prepared.call
        state = dict(self._start)
        self._own_buffers(calls)
        found: _Results = {}
        for run, call in enumerate(calls):
            given = {**state, **call.inputs}
            inputs = [given[index] for index in range(len(self._sources))]
            taken = [runtime.values.snapshot(inputs[index]) for index in cached.values.donated]
            outputs = runtime.executables.run(cached.executable, inputs, taken=taken)
            for index, output in layout.carried.items():
                state[index] = found[output, None] = outputs[output]
            found.update({(output, run): outputs[output] for output in layout.each})
        self._prepared.compiled = runtime.counters.executables_compiled()
        return found

    def _write_back(self, calls: list[_WaitingCall], results: _Results) -> None:
        layout, runtime, cached = self._layout, self._runtime, self._prepared.call
        last = len(calls) - 1
        final = {
            output: results[output, last] if (output, last) in results else results[output, None]
            for output in {*layout.each, *layout.carried.values()}
        }
        tensors = [tensor for tensor, _ in self._written]
        runtime.values.write(tensors, [final[output] for _, output in self._written])
        runtime.lazy.forget_writes(tensors)
        runtime.shared_buffers.note_own_buffers(tensors)
        for run, call in enumerate(calls):
            for tensor, output in call.pending:
                runtime.values.write([tensor], [results[output, run]])
        cached.outputs.update({output: final[output] for output in cached.outputs if output in final})


def _number(source: Slot | str | Number) -> Number:
    assert isinstance(source, Number)
    return source
