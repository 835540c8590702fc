"""`StepReplay`: decides for each pass of a step whether it is traced or replayed."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from xla_adapters.backend import get_backend
from xla_adapters.replay.cached import CachedScope, SeparatingScope
from xla_adapters.replay.capture import RecordingScope
from xla_adapters.replay.errors import CannotReplay
from xla_adapters.replay.facts import environment
from xla_adapters.replay.own_code import recording_dropped
from xla_adapters.replay.passes import ReplayPass
from xla_adapters.replay.recording import Recording
from xla_adapters.replay.request import Request
from xla_adapters.replay.together import StepsTogether
from xla_adapters.rng import StepSeed
from xla_adapters.waiting_steps import settle

logger = logging.getLogger("xla_adapters")

# Passes in a row that could not be recorded, or differed from the one before, until the attempt is given up.
_ATTEMPTS = 4
# Signatures kept; the one that was not used for longest is recorded anew when it comes back.
_SIGNATURES = 64


@dataclass
class _Plan:
    recording: Recording | None = None
    proven: bool = False
    failures: int = 0
    waited: int = 0
    patience: int = 0
    # Since it was traced last.
    replayed: int = 0
    is_due: bool = False
    verifying: bool = False
    # Whether the last traced pass ran an executable that replays would call.
    is_cached: bool = False


@dataclass
class StepReplay:
    """The recordings of one step, one for each of its signatures.

    A pass is replayed after two traced passes of its signature agreed, as long as nothing has changed
    that the graph depends on. When something has, the pass is traced again, and the reason noted.

    Attributes:
        name: of the step, for messages.
        verify_every: replays after which a pass is traced and held against them; None for never.
        together: where replayed passes wait for each other; None if each is executed at once.
        replays: passes that were replayed.
        reasons: why passes were traced that might have been replayed, with how often.
    """

    name: str
    verify_every: int | None = None
    together: StepsTogether | None = None
    replays: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    _plans: OrderedDict[Hashable, _Plan] = field(default_factory=OrderedDict)
    _told: set[str] = field(default_factory=set)
    _executables: set[bytes] = field(default_factory=set)

    def choose(self, key: Hashable, request: Request, seed: StepSeed | None, **options: Any) -> Any:
        """The execution of the next pass.

        Args:
            key: what the pass looks like from outside.
            request: what is known of it.
            seed: its random stream.
            **options: as for `StepScope`.
        """
        backend = get_backend()
        settle("another step begins", but=self.together)
        plan = self._plan_of((key, environment()))
        if plan.failures >= _ATTEMPTS:
            # Its graph must be that of the passes before, down to the numbers that share an input.
            scope = CachedScope if plan.is_cached else SeparatingScope
            return scope(request, seed=seed, **options)
        plan.patience = request.patience
        is_packed = plan.recording is not None and plan.recording.packed is not None
        if plan.waited > (0 if is_packed else plan.patience):
            # The proof needs values, and no transfer came by that could have brought them; another trace would make two
            # of its own, to have an optimizer's state in its place.
            backend.deliver_riders()
        if plan.proven and (plan.is_due or (self.verify_every is not None and plan.replayed >= self.verify_every)):
            # The recording stays: the passes that are traced now must agree with it.
            plan.proven, plan.verifying = False, True
        if plan.proven and plan.recording is not None:
            if self.together is not None or not backend.eager():
                backend.flush()
            try:
                with torch._C.DisableTorchFunctionSubclass():
                    obstacle = plan.recording.obstacle(backend, request.set_modes)
                if obstacle is not None:
                    raise CannotReplay(obstacle)
                updates = [recipe.play() for recipe in plan.recording.recipes]
                for update, traced in zip(updates, plan.recording.updates, strict=True):
                    if update.operators != traced.operators:
                        raise CannotReplay("the optimizer takes another course than when the step was recorded")
                numbers = plan.recording.new_numbers(updates)
                waits = self.together is not None and self.together.takes(plan.recording)
                return ReplayPass(
                    self.name,
                    plan.recording,
                    tensors=request.tensors,
                    updates=updates,
                    numbers=numbers,
                    seed=seed,
                    backend=backend,
                    done=lambda: self._count(plan),
                    together=self.together if waits else None,
                )
            except CannotReplay as error:
                self.note(str(error))
                plan.recording, plan.proven = None, False
                recording_dropped()
        plan.is_due = False
        settle("a step is traced")

        def take(outcome: Recording | CannotReplay, is_cached: bool) -> None:
            plan.is_cached = is_cached
            self._take(plan, outcome)

        return RecordingScope(request, self._executables, take, seed=seed, **options)

    def verify(self) -> None:
        """Has the next pass of each signature traced, and held against what was replayed."""
        for plan in self._plans.values():
            plan.is_due = True

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
        """Notes why a pass is traced without an attempt to record it."""
        self.note(reason)
        self._tell(reason)

    def _take(self, plan: _Plan, outcome: Recording | CannotReplay) -> None:
        backend = get_backend()
        before, plan.recording, plan.proven = plan.recording, None, False
        if isinstance(outcome, CannotReplay):
            self._fail(plan, str(outcome))
            return
        if outcome.unrepeatable:
            self.note(outcome.unrepeatable)
            return
        plan.recording = outcome
        if before is None:
            return
        reason = outcome.difference(before)
        if reason is not None:
            # Numbers that came to be equal make another graph: replays went on with inputs of their own.
            plan.verifying = plan.verifying and not before.shares_otherwise(outcome.updates)
            self._fail(plan, reason)
            return
        plan.waited += 1
        mine, theirs = outcome.numbers(), before.numbers()

        def prove(values: list[torch.Tensor]) -> None:
            if plan.recording is not outcome or plan.proven:
                return
            floats = [float(value) for value in values]
            reason = outcome.resolve_numbers(before, floats[: len(mine)], floats[len(mine) :])
            plan.waited = 0
            plan.verifying = plan.verifying and reason is not None
            if reason is not None:
                self._fail(plan, reason)
                return
            outcome.ready(backend)
            plan.proven, plan.failures, plan.replayed = True, 0, 0

        backend.ride_along([number.value for number in (*mine, *theirs)], prove)

    def _fail(self, plan: _Plan, reason: str) -> None:
        plan.failures += 1
        plan.waited = 0
        if plan.verifying:
            plan.verifying = False
            logger.warning(
                "%s: a traced pass differs from the %d before it, which were replayed: %s. They may have left "
                "something out; step_replay=False traces each pass",
                self.name,
                plan.replayed,
                reason,
            )
        plan.replayed = 0
        self.note(reason)
        if plan.failures == _ATTEMPTS:
            plan.recording = None
            self._tell(reason)

    def note(self, reason: str) -> None:
        """Notes why a pass is traced."""
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            logger.info("%s: traced at each pass, not replayed: %s", self.name, reason)
