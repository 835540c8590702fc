"""`TraceOrReplay`: decides for each call of a step whether it is traced or replayed."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from xla_adapters.replay.batch_reads import BatchReads, ReadsOfReplay
from xla_adapters.replay.call_spec import CallSpec
from xla_adapters.replay.capture import CaptureScope
from xla_adapters.replay.executable_scope import ExecutableScope, SeparatingScope
from xla_adapters.replay.guards.process_modes import environment
from xla_adapters.replay.launcher import Launcher
from xla_adapters.replay.number_inputs import HostUpdate, Number, find_roles, numbers_of
from xla_adapters.replay.replayed_call import ReplayedCall
from xla_adapters.replay.tensor_places import CannotReplay
from xla_adapters.replay.traced_call import TracedCall
from xla_adapters.replay.verification import Verification, next_due
from xla_adapters.runtime import Runtime, get_runtime
from xla_adapters.runtime.rng import StepSeed
from xla_adapters.tracing.index_check import CheckedIndices, values_on_host
from xla_adapters.tracing.step_scope import StepScope

logger = logging.getLogger("xla_adapters")

# After so many calls in a row that could not be captured, or differed from the one before, the next are only traced.
_ATTEMPTS = 4
# That many of them, and twice as many after each further attempt: what was in the way (a hook) may be gone.
_PAUSE = 16
# Courses of one signature: what its calls decide by the values of their batches. Calls that go yet another one are
# traced.
_COURSES = 32
# Signatures kept. The one that was not used for the longest time is dropped, and captured again when it comes back.
_SIGNATURES = 64


@dataclass
class _Record:
    """What is known of the calls of one signature.

    Attributes:
        call: the last traced one, if it could be captured.
        launcher: set when two traced calls agreed: the next calls are replayed.
        failures: traced calls in a row that could not be captured or differed.
        skipped: calls since no more were tried.
        pause: after how many of these one is tried; None for never.
        waited: traced calls since the values to compare were asked for.
        deadline: see `CallSpec`.
        replayed: replays since `launcher` was set or last verified.
        due: how many replays there are before the next verification; None for no verification.
        trusted: calls of the step up to the last traced one.
        is_executable_kept: whether the last traced call ran an executable that replays would call.
        indices: by the positions of those tensors of the batch whose values the host knows: what a replay compares.
        graph: the name of the graph that they are of.
    """

    call: TracedCall | None = None
    launcher: Launcher | None = None
    failures: int = 0
    skipped: int = 0
    pause: int | None = _PAUSE
    waited: int = 0
    deadline: int = 0
    replayed: int = 0
    due: int | None = None
    trusted: int = 0
    is_executable_kept: bool = False
    indices: dict[frozenset[int], CheckedIndices] = field(default_factory=dict)
    graph: bytes = b""

    def note_indices(self, known: frozenset[int], batch: Sequence[torch.Tensor], graph: bytes) -> None:
        """A traced call has found all indices in its batch in range.

        Args:
            known: the positions of the tensors whose values the host knew.
            batch: its tensors.
            graph: the name of its graph; empty if that was not captured.
        """
        if graph != self.graph:
            # Another graph may look up in other tensors. Without known values nothing is compared.
            self.indices = {of: found for of, found in self.indices.items() if not of}
        self.indices[known], self.graph = CheckedIndices(batch), graph

    def forget(self) -> None:
        """Forgets what was captured."""
        self.call = self.launcher = None

    def begin_replays(self, launcher: Any) -> None:
        """Two traced calls agreed: what failed before does not count any more."""
        self.launcher = launcher
        self.failures = self.replayed = 0
        self.pause = None if self.pause is None else _PAUSE

    def is_skipped(self) -> bool:
        """Whether the next call is not worth an attempt to capture it."""
        if self.failures < _ATTEMPTS:
            return False
        self.skipped += 1
        if self.pause is None or self.skipped <= self.pause:
            return True
        self.failures, self.skipped, self.pause = _ATTEMPTS - 1, 0, 2 * self.pause
        return False


@dataclass
class TraceOrReplay:
    """What is known of the calls of one step, for each signature.

    After two traced calls of a signature agreed, its calls are replayed as long as nothing has changed that the graph
    depends on. After a change the call is traced again, and the reason is noted.

    Attributes:
        name: of the step, for messages.
        verify_every: see `XLAConfig.replay_verify_every`.
        calls: returns how many calls of the step there were.
        on_mismatch: called when a traced call differs from its replay, with what differs, and the number of calls whose
            results can be trusted.
        replays: calls that were replayed.
        verified: calls that were traced to verify the replays before them.
        reasons: why calls were traced that might have been replayed, with how often.
    """

    name: str
    verify_every: int | None = None
    calls: Callable[[], int] = int
    on_mismatch: Callable[[str, int], None] = lambda what, trusted: None
    replays: int = 0
    verified: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    _records: OrderedDict[Hashable, _Record] = field(default_factory=OrderedDict)
    _courses: OrderedDict[Hashable, list[BatchReads]] = field(default_factory=OrderedDict)
    _told: set[str] = field(default_factory=set)
    _executables: set[bytes] = field(default_factory=set)

    def choose(self, key: Hashable, spec: CallSpec, seed: StepSeed | None, **options: Any) -> Any:
        """Returns the execution of the next call: a `ReplayedCall`, or a scope that traces it.

        Args:
            key: the signature; calls with different keys never share an executable.
            spec: describes the call.
            seed: where its random numbers start; by default the device's stream continues.
            **options: as for `StepScope`.
        """
        runtime = get_runtime()
        signature = key, environment(), self._gradients(spec)
        course, reads = self._course(signature, spec)
        record = self._record_of((signature, course))
        if record.is_skipped():
            # The scope must make the same graph as those before, including which numbers share an input.
            return self._uncaptured(record, spec, seed=seed, **options)
        record.deadline = spec.deadline
        if record.waited > record.deadline:
            # The numbers must be compared, and no transfer has brought them to the host yet. A transfer of their own is
            # cheaper than another trace.
            runtime.transfers.deliver_piggy_backed()
        verification: Verification | None = None
        if record.launcher is not None:
            if not runtime.tracing.eager():
                runtime.tracing.flush()
            try:
                next_call = self._replay(record, record.launcher, spec, seed, runtime, reads)
            except CannotReplay as error:
                self.note(str(error))
                record.forget()
                spec.look_again()
            else:
                if isinstance(next_call, ReplayedCall):
                    return next_call
                verification = next_call
            spec.tensors.batch = spec.batch
        return self._capture(signature, record, spec, verification, seed, options)

    def _course(self, signature: Hashable, spec: CallSpec) -> tuple[Hashable, ReadsOfReplay | None]:
        """What the next call decides by the values of its batch, if that is known before it is traced."""
        known = self._courses.get(signature, ())
        values = values_on_host(spec.batch) if known else {}
        for reads in known:
            present = reads.of(values)
            if present is not None:
                return reads.course, present
        return None, None

    def _note_course(self, signature: Hashable, reads: BatchReads) -> bool:
        """Notes what a traced call has decided; returns whether there is a place for it."""
        courses = self._courses.setdefault(signature, [])
        self._courses.move_to_end(signature)
        if len(self._courses) > _SIGNATURES:
            self._courses.popitem(last=False)
        others = [other for other in courses if other.course != reads.course]
        if len(others) == _COURSES:
            return False
        courses[:] = [*others, reads]
        return True

    def _gradients(self, spec: CallSpec) -> Hashable:
        """Which gradients are there, where calls with others are other calls."""
        return ()

    def _replay(
        self,
        record: _Record,
        launcher: Launcher,
        spec: CallSpec,
        seed: StepSeed | None,
        runtime: Runtime,
        reads: ReadsOfReplay | None,
    ) -> ReplayedCall | Verification:
        """The replay of the next call; or its verification, if that is due.

        Raises:
            CannotReplay: the next call is another one.
        """
        values = values_on_host(spec.batch)
        indices = record.indices.get(frozenset(values))
        if indices is None:
            raise CannotReplay("the values of other tensors of the batch are known on the host")
        if not indices.are_in_range(values):
            raise CannotReplay("an index in the batch is out of range")
        if reads is not None:
            spec.tensors.batch = [*spec.batch, *reads.upload(runtime)]
        updates = self._updates(launcher, spec, runtime)
        numbers = launcher.new_numbers(updates)
        if record.due is None or record.replayed < record.due:
            return self._replayed(
                self.name,
                launcher,
                tensors=spec.tensors,
                updates=updates,
                numbers=numbers,
                seed=seed,
                runtime=runtime,
                done=lambda: self._count(record),
                reads=reads,
            )
        return self._verification(launcher, spec, numbers, seed, runtime)

    def _uncaptured(self, record: _Record, spec: CallSpec, **options: Any) -> StepScope:
        """The scope of a call that is traced and not captured."""
        separating = ExecutableScope if record.is_executable_kept else SeparatingScope
        return separating(spec, **options)

    def refused(self, spec: CallSpec, **options: Any) -> Any:
        """The scope of a call that may not be replayed; None if any will do.

        The reason may come up when the step has run before (a hook, code that changes in each step). Its graph is then
        known by the name under which replays call it.

        Args:
            spec: describes the call.
            **options: as for `StepScope`.
        """
        return ExecutableScope(spec, **options) if self._executables else None

    def _replayed(self, name: str, launcher: Launcher, **options: Any) -> ReplayedCall:
        """The replay of a call."""
        return ReplayedCall(name, launcher, **options)

    def _verification(
        self,
        launcher: Launcher,
        spec: CallSpec,
        numbers: Sequence[tuple[Number, float]],
        seed: StepSeed | None,
        runtime: Runtime,
    ) -> Verification:
        """Compares the next call, which is traced, with its replay."""
        with torch.no_grad(), torch._C.DisableTorchFunction():
            runtime.random.set_seed(runtime.random.seed() if seed is None else seed.value())
            inputs = launcher.inputs(spec.tensors, numbers, runtime)
        return Verification(launcher, spec.tensors, inputs)

    @staticmethod
    def _updates(launcher: Launcher, spec: CallSpec, runtime: Runtime) -> list[HostUpdate]:
        """The optimizers' host math of the next call.

        Raises:
            CannotReplay: the next call is another one.
        """
        with torch._C.DisableTorchFunctionSubclass():
            reason = launcher.reason_to_trace(spec.tensors, runtime, spec.set_modes)
        if reason is not None:
            raise CannotReplay(reason)
        updates = [math.play() for math in launcher.call.host.optimizers]
        for update, traced in zip(updates, launcher.call.updates, strict=True):
            if update.takes_another_course(traced):
                raise CannotReplay("the optimizer takes another course than when the step was traced")
        return updates

    def _capture(
        self,
        signature: Hashable,
        before: _Record,
        spec: CallSpec,
        verification: Verification | None,
        seed: StepSeed | None,
        options: dict[str, Any],
    ) -> CaptureScope:
        known = frozenset(values_on_host(spec.batch))

        def take(outcome: TracedCall | CannotReplay, is_executable_kept: bool) -> None:
            record = before
            reads = outcome.reads if isinstance(outcome, TracedCall) else None
            if reads is not None and not self._note_course(signature, reads):
                outcome = CannotReplay(f"the values of its batches decide what it does, in more than {_COURSES} ways")
            elif reads is not None:
                record = self._record_of((signature, reads.course))
                record.deadline = spec.deadline
            record.is_executable_kept = is_executable_kept
            record.note_indices(known, spec.batch, b"" if isinstance(outcome, CannotReplay) else outcome.graph)
            if verification is not None and self._is_verified(record, verification, outcome, scope):
                return
            self._take(record, outcome, spec)

        scope = self._capturing(spec, take, verification, seed=seed, **options)
        return scope

    def _capturing(
        self,
        spec: CallSpec,
        done: Callable[[TracedCall | CannotReplay, bool], None],
        verification: Verification | None,
        **options: Any,
    ) -> CaptureScope:
        """The scope of a call that is traced and captured."""
        return CaptureScope(spec, self._executables, done, verification, **options)

    def _is_verified(
        self, record: _Record, verification: Verification, outcome: TracedCall | CannotReplay, scope: CaptureScope
    ) -> bool:
        """Whether the traced call computed what its replay would have computed, or the difference was reported."""
        self.verified += 1
        trusted, record.trusted = record.trusted, self.calls() + 1
        record.due = next_due(record.replayed, self.verify_every)
        if verification.agrees and not isinstance(outcome, CannotReplay):
            verification.launcher.call.updates = outcome.updates
            return True
        what = verification.difference(scope.returned(), get_runtime())
        if what is not None:
            record.forget()
            record.failures, record.pause = _ATTEMPTS, None
            self.note(f"a traced call differs from its replay: {what}")
            self.on_mismatch(what, trusted)
            return True
        return False

    def verify(self) -> None:
        """Has the next call of each signature traced and compared with its replay."""
        for record in self._records.values():
            record.due = 0

    def _count(self, record: _Record) -> None:
        self.replays += 1
        record.replayed += 1

    def _record_of(self, key: Hashable) -> _Record:
        record = self._records.setdefault(key, _Record())
        self._records.move_to_end(key)
        if len(self._records) > _SIGNATURES:
            del self._records[next(iter(self._records))]
        return record

    def refuse(self, reason: str) -> None:
        """Notes why a call is traced without an attempt to capture it."""
        self.note(reason)
        self._tell(reason)

    def _take(self, record: _Record, outcome: TracedCall | CannotReplay, spec: CallSpec) -> None:
        """Compares a traced call with the one before; if they agree, the next one is replayed."""
        before = record.call
        record.forget()
        if isinstance(outcome, CannotReplay):
            self._fail(record, str(outcome), spec)
            return
        if outcome.unrepeatable:
            self.note(outcome.unrepeatable)
            return
        record.call = outcome
        if before is None:
            return
        reason = outcome.difference(before)
        if reason is not None:
            self._fail(record, reason, spec)
            return
        record.waited += 1
        self._prepare(record, outcome, before, spec)

    def _prepare(self, record: _Record, call: TracedCall, before: TracedCall, spec: CallSpec) -> None:
        """Finds out which inputs are the optimizers' numbers, once a transfer brings their values to the host."""
        runtime = get_runtime()

        def prepare(values: list[torch.Tensor]) -> None:
            if record.call is not call or record.launcher is not None:
                return
            floats = [float(value) for value in values]
            count = len(call.numbers)
            record.waited = 0
            try:
                fixed = find_roles(
                    call.numbers, floats[:count], floats[count:], numbers_of(call.updates), numbers_of(before.updates)
                )
            except CannotReplay as error:
                self._fail(record, str(error), spec)
                return
            record.begin_replays(Launcher(call, fixed, runtime))
            record.due, record.trusted = next_due(0, self.verify_every), self.calls()

        numbers = [number.value for number in (*call.numbers, *before.numbers)]
        runtime.transfers.piggy_back(numbers, prepare, must_arrive=False)

    def _fail(self, record: _Record, reason: str, spec: CallSpec) -> None:
        record.failures += 1
        record.waited = record.replayed = 0
        # The user code may have changed too.
        spec.look_again()
        self.note(reason)
        if record.failures == _ATTEMPTS:
            record.forget()
            self._tell(reason)

    def note(self, reason: str) -> None:
        """Notes why a call is traced."""
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            logger.info("%s: traced at each call, not replayed: %s", self.name, reason)
