"""`ExecutableCache`: decides for each call of a step whether it is traced or replayed."""

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
from xla_adapters.replay.executable_scope import CachedScope, SeparatingScope
from xla_adapters.replay.guards.ambient import environment
from xla_adapters.replay.launcher import PreparedCall
from xla_adapters.replay.number_inputs import Number, Update, find_roles, numbers_of
from xla_adapters.replay.replayed_call import ReplayedCall
from xla_adapters.replay.tensor_places import CannotReplay
from xla_adapters.replay.traced_call import CachedCall
from xla_adapters.replay.verification import Verification, next_due
from xla_adapters.runtime import Runtime, get_runtime
from xla_adapters.runtime.rng import StepSeed
from xla_adapters.tracing.index_check import Lookups, values_on_host
from xla_adapters.tracing.step_scope import StepScope

logger = logging.getLogger("xla_adapters")

# After so many calls in a row that could not be captured, or differed from the one before, no more are tried.
_ATTEMPTS = 4
# Courses of one signature: what its calls decide by the values of their batches. Calls that go yet another one are
# traced.
_COURSES = 32
# Signatures kept. The one that was not used for the longest time is dropped, and captured again when it comes back.
_SIGNATURES = 64


@dataclass
class _Plan:
    """What is known of the calls of one signature.

    Attributes:
        call: the last traced one, if it could be captured.
        prepared: set when two traced calls agreed: the next calls are replayed.
        failures: traced calls in a row that could not be captured or differed.
        waited: traced calls since the values to compare were asked for.
        patience: see `CallSpec`.
        replayed: replays since `prepared` was set or last verified.
        due: how many replays there are before the next verification; None for no verification.
        trusted: calls of the step up to the last traced one.
        is_cached: whether the last traced call ran an executable that replays would call.
        lookups: by the positions of those tensors of the batch whose values the host knows: what a replay compares.
        graph: the name of the graph that they are of.
    """

    call: CachedCall | None = None
    prepared: PreparedCall | None = None
    failures: int = 0
    waited: int = 0
    patience: int = 0
    replayed: int = 0
    due: int | None = None
    trusted: int = 0
    is_cached: bool = False
    lookups: dict[frozenset[int], Lookups] = field(default_factory=dict)
    graph: bytes = b""

    def note_lookups(self, known: frozenset[int], batch: Sequence[torch.Tensor], graph: bytes) -> None:
        """A traced call has found all indices in its batch in range.

        Args:
            known: the positions of the tensors whose values the host knew.
            batch: its tensors.
            graph: the name of its graph; empty if that was not captured.
        """
        if graph != self.graph:
            # Another graph may look up in other tensors. Without known values nothing is compared.
            self.lookups = {of: found for of, found in self.lookups.items() if not of}
        self.lookups[known], self.graph = Lookups(batch), graph

    def forget(self) -> None:
        """Forgets what was captured."""
        self.call = self.prepared = None


@dataclass
class ExecutableCache:
    """The cached calls of one step, one for each signature.

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
    _plans: OrderedDict[Hashable, _Plan] = field(default_factory=OrderedDict)
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
        plan = self._plan_of((signature, course))
        if plan.failures >= _ATTEMPTS:
            # The scope must make the same graph as those before, including which numbers share an input.
            return self._uncaptured(plan, spec, seed=seed, **options)
        plan.patience = spec.patience
        if plan.waited > plan.patience:
            # The numbers must be compared, and no transfer has brought them to the host yet. A transfer of their own is
            # cheaper than another trace.
            runtime.transfers.deliver_piggy_backed()
        verification: Verification | None = None
        if plan.prepared is not None:
            if not runtime.tracing.eager():
                runtime.tracing.flush()
            try:
                next_call = self._replay(plan, plan.prepared, spec, seed, runtime, reads)
            except CannotReplay as error:
                self.note(str(error))
                plan.forget()
                spec.look_again()
            else:
                if isinstance(next_call, ReplayedCall):
                    return next_call
                verification = next_call
            spec.tensors.batch = spec.batch
        return self._capture(signature, plan, spec, verification, seed, options)

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
        plan: _Plan,
        prepared: PreparedCall,
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
        lookups = plan.lookups.get(frozenset(values))
        if lookups is None:
            raise CannotReplay("the values of other tensors of the batch are known on the host")
        if not lookups.are_in_range(values):
            raise CannotReplay("an index in the batch is out of range")
        if reads is not None:
            spec.tensors.batch = [*spec.batch, *reads.upload(runtime)]
        updates = self._updates(prepared, spec, runtime)
        numbers = prepared.new_numbers(updates)
        if plan.due is None or plan.replayed < plan.due:
            return self._replayed(
                self.name,
                prepared,
                tensors=spec.tensors,
                updates=updates,
                numbers=numbers,
                seed=seed,
                runtime=runtime,
                done=lambda: self._count(plan),
                reads=reads,
            )
        return self._verification(prepared, spec, numbers, seed, runtime)

    def _uncaptured(self, plan: _Plan, spec: CallSpec, **options: Any) -> StepScope:
        """The scope of a call that is traced and not captured."""
        separating = CachedScope if plan.is_cached else SeparatingScope
        return separating(spec, **options)

    def refused(self, spec: CallSpec, **options: Any) -> Any:
        """The scope of a call that may not be replayed; None if any will do.

        An obstacle may come up when the step has run before (a hook, code that changes in each step). Its graph is then
        known by the name under which replays call it.

        Args:
            spec: describes the call.
            **options: as for `StepScope`.
        """
        return CachedScope(spec, **options) if self._executables else None

    def _replayed(self, name: str, prepared: PreparedCall, **options: Any) -> ReplayedCall:
        """The replay of a call."""
        return ReplayedCall(name, prepared, **options)

    def _verification(
        self,
        prepared: PreparedCall,
        spec: CallSpec,
        numbers: Sequence[tuple[Number, float]],
        seed: StepSeed | None,
        runtime: Runtime,
    ) -> Verification:
        """Compares the next call, which is traced, with its replay."""
        with torch.no_grad(), torch._C.DisableTorchFunction():
            runtime.random.set_seed(runtime.random.seed() if seed is None else seed.value())
            inputs = prepared.inputs(spec.tensors, numbers, runtime)
        return Verification(prepared, spec.tensors, inputs)

    @staticmethod
    def _updates(prepared: PreparedCall, spec: CallSpec, runtime: Runtime) -> list[Update]:
        """The optimizers' host math of the next call.

        Raises:
            CannotReplay: the next call is another one.
        """
        with torch._C.DisableTorchFunctionSubclass():
            obstacle = prepared.obstacle(spec.tensors, runtime, spec.set_modes)
        if obstacle is not None:
            raise CannotReplay(obstacle)
        updates = [math.play() for math in prepared.call.host.optimizers]
        for update, traced in zip(updates, prepared.call.updates, strict=True):
            if update.takes_another_course(traced):
                raise CannotReplay("the optimizer takes another course than when the step was traced")
        return updates

    def _capture(
        self,
        signature: Hashable,
        before: _Plan,
        spec: CallSpec,
        verification: Verification | None,
        seed: StepSeed | None,
        options: dict[str, Any],
    ) -> CaptureScope:
        known = frozenset(values_on_host(spec.batch))

        def take(outcome: CachedCall | CannotReplay, is_cached: bool) -> None:
            plan = before
            reads = outcome.reads if isinstance(outcome, CachedCall) else None
            if reads is not None and not self._note_course(signature, reads):
                outcome = CannotReplay(f"the values of its batches decide what it does, in more than {_COURSES} ways")
            elif reads is not None:
                plan = self._plan_of((signature, reads.course))
                plan.patience = spec.patience
            plan.is_cached = is_cached
            plan.note_lookups(known, spec.batch, b"" if isinstance(outcome, CannotReplay) else outcome.graph)
            if verification is not None and self._is_verified(plan, verification, outcome, scope):
                return
            self._take(plan, outcome, spec)

        scope = self._capturing(spec, take, verification, seed=seed, **options)
        return scope

    def _capturing(
        self,
        spec: CallSpec,
        done: Callable[[CachedCall | CannotReplay, bool], None],
        verification: Verification | None,
        **options: Any,
    ) -> CaptureScope:
        """The scope of a call that is traced and captured."""
        return CaptureScope(spec, self._executables, done, verification, **options)

    def _is_verified(
        self, plan: _Plan, verification: Verification, outcome: CachedCall | CannotReplay, scope: CaptureScope
    ) -> bool:
        """Whether the traced call computed what its replay would have computed, or the difference was reported."""
        self.verified += 1
        trusted, plan.trusted = plan.trusted, self.calls() + 1
        plan.due = next_due(plan.replayed, self.verify_every)
        if verification.agrees and not isinstance(outcome, CannotReplay):
            verification.prepared.call.updates = outcome.updates
            return True
        what = verification.difference(scope.returned(), get_runtime())
        if what is not None:
            plan.forget()
            plan.failures = _ATTEMPTS
            self.note(f"a traced call differs from its replay: {what}")
            self.on_mismatch(what, trusted)
            return True
        return False

    def verify(self) -> None:
        """Has the next call of each signature traced and compared with its replay."""
        for plan in self._plans.values():
            plan.due = 0

    def _count(self, plan: _Plan) -> None:
        self.replays += 1
        plan.replayed += 1

    def _plan_of(self, key: Hashable) -> _Plan:
        plan = self._plans.setdefault(key, _Plan())
        self._plans.move_to_end(key)
        if len(self._plans) > _SIGNATURES:
            del self._plans[next(iter(self._plans))]
        return plan

    def refuse(self, reason: str) -> None:
        """Notes why a call is traced without an attempt to capture it."""
        self.note(reason)
        self._tell(reason)

    def _take(self, plan: _Plan, outcome: CachedCall | CannotReplay, spec: CallSpec) -> None:
        """Compares a traced call with the one before; if they agree, the next one is replayed."""
        before = plan.call
        plan.forget()
        if isinstance(outcome, CannotReplay):
            self._fail(plan, str(outcome), spec)
            return
        if outcome.unrepeatable:
            self.note(outcome.unrepeatable)
            return
        plan.call = outcome
        if before is None:
            return
        reason = outcome.difference(before)
        if reason is not None:
            self._fail(plan, reason, spec)
            return
        plan.waited += 1
        self._prepare(plan, outcome, before, spec)

    def _prepare(self, plan: _Plan, call: CachedCall, before: CachedCall, spec: CallSpec) -> None:
        """Finds out which inputs are the optimizers' numbers, once a transfer brings their values to the host."""
        runtime = get_runtime()

        def prepare(values: list[torch.Tensor]) -> None:
            if plan.call is not call or plan.prepared is not None:
                return
            floats = [float(value) for value in values]
            count = len(call.numbers)
            plan.waited = 0
            try:
                fixed = find_roles(
                    call.numbers, floats[:count], floats[count:], numbers_of(call.updates), numbers_of(before.updates)
                )
            except CannotReplay as error:
                self._fail(plan, str(error), spec)
                return
            plan.prepared = PreparedCall(call, fixed, runtime)
            plan.failures = plan.replayed = 0
            plan.due, plan.trusted = next_due(0, self.verify_every), self.calls()

        numbers = [number.value for number in (*call.numbers, *before.numbers)]
        runtime.transfers.piggy_back(numbers, prepare, must_arrive=False)

    def _fail(self, plan: _Plan, reason: str, spec: CallSpec) -> None:
        plan.failures += 1
        plan.waited = plan.replayed = 0
        # The user code may have changed too.
        spec.look_again()
        self.note(reason)
        if plan.failures == _ATTEMPTS:
            plan.forget()
            self._tell(reason)

    def note(self, reason: str) -> None:
        """Notes why a call is traced."""
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            logger.info("%s: traced at each call, not replayed: %s", self.name, reason)
