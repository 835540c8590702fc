"""`StepProgram`: the step as an object. It knows what it was traced for and explains each compile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from xla_adapters.backend import get_backend
from xla_adapters.config import XLAConfig
from xla_adapters.errors import UnsupportedOptionError
from xla_adapters.mapped_memory import MappedMemory
from xla_adapters.random_algorithm import use_random_algorithm
from xla_adapters.replay.bound import Owner
from xla_adapters.replay.cached import SeparatingScope
from xla_adapters.replay.facts import all_related, own_mode
from xla_adapters.replay.passes import ReplayPass
from xla_adapters.replay.places import PassTensors
from xla_adapters.replay.policy import StepReplay
from xla_adapters.replay.recording import Recording
from xla_adapters.replay.request import Request
from xla_adapters.replay.together import StepsTogether
from xla_adapters.rng import StepSeed
from xla_adapters.step_scope import ScopeReport, StepScope, in_step

logger = logging.getLogger("xla_adapters")


class StepExecution(Protocol):
    """How one pass through a step is executed.

    `StepScope` traces it again at each pass. Another way (handing new inputs to the executable that
    an earlier pass compiled) is another class with these methods.
    """

    @property
    def is_open(self) -> bool: ...
    @property
    def executed(self) -> bool: ...
    def open(self) -> None: ...
    def close(self) -> ScopeReport: ...
    def abort(self) -> None: ...
    def translate(self, error: BaseException) -> Exception | None: ...


@dataclass(frozen=True, kw_only=True)
class StepSignature:
    """What a pass through the step looks like from outside; passes that differ here differ in graph.

    Attributes:
        phase: which part of the loop this is, e.g. `"update"` or `"accumulate"`.
        inputs: name, shape and dtype of each tensor of the batch; other values by their repr.
        facts: further things that shape the graph, as the adapter knows them.
    """

    phase: str
    inputs: tuple[tuple[str, str], ...]
    facts: tuple[tuple[str, Hashable], ...] = ()

    def difference(self, other: StepSignature) -> list[str]:
        """How this differs from an earlier signature, in words."""
        changes = []
        for mine, theirs in ((dict(self.inputs), dict(other.inputs)), (dict(self.facts), dict(other.facts))):
            for name in dict.fromkeys([*theirs, *mine]):
                before, now = theirs.get(name, "absent"), mine.get(name, "absent")
                if before != now:
                    changes.append(f"{name}: {before} -> {now}")
        return changes


@dataclass(frozen=True, kw_only=True)
class CompileEvent:
    """One pass that had to compile.

    Attributes:
        number: how many graphs the step has now.
        passes: the pass it happened in, from 1.
        graphs: graphs compiled in this pass.
        seconds: time spent compiling.
        reason: why, in words.
        where: the place in the run, e.g. `"batch 7 of epoch 0"`; empty if not known.
    """

    number: int
    passes: int
    graphs: int
    seconds: float
    reason: str
    where: str = ""


@dataclass(frozen=True, kw_only=True)
class ReplayRequest:
    """What must be known of a pass to record it, and to replay it later.

    Attributes:
        key: passes that differ here are different calls; all values hashable.
        batch: tensors on the device that the step only reads, in the same order each time.
        extras: further tensors from outside that the step may update in place, in the same order each time.
        modules: that take part, beside those that are called.
        set_modes: what the step does first to put its modules into their modes, if it does.
        patience: passes that may be traced while the proof waits for somebody else's transfer to the host.
        obstacle: why the step cannot be replayed, if so (overridden by `step_replay=True`).
        bound: the objects whose attributes the step may bind anew, as they are when it is called.
        watched: what the step's Python must leave as it is, by name: compared before and behind the step.
        unrelated: of a module, the attributes that no graph depends on, or that are noted elsewhere.
        constants: tensors that the step may read and nobody writes.
        change: what the step's own code reads that has changed since the pass before, if something has.
    """

    key: tuple[Hashable, ...] = ()
    batch: Sequence[torch.Tensor] = ()
    extras: Sequence[torch.Tensor] = ()
    modules: Sequence[torch.nn.Module] = ()
    set_modes: Callable[[], object] | None = None
    patience: int = 0
    obstacle: str | None = None
    bound: Callable[[], Sequence[Owner]] = tuple
    watched: Callable[[], Mapping[str, object]] = dict
    unrelated: Callable[[torch.nn.Module], Collection[str]] = all_related
    constants: Sequence[torch.Tensor] = ()
    change: str | None = None


@dataclass
class StepProgram:
    """A step that is run many times.

    Args:
        name: of the step, for messages and dumps.
        config: the options.
        hint: where the host framework offers a place for reads, for messages.
        execution: makes the execution of one pass; `StepScope` by default.
    """

    name: str
    config: XLAConfig
    hint: str = ""
    execution: Callable[..., StepExecution] = StepScope
    passes: int = 0
    graphs: int = 0
    compile_seconds: float = 0.0
    events: list[CompileEvent] = field(default_factory=list)
    _graph_names: set[str] = field(default_factory=set)
    _seen: list[StepSignature] = field(default_factory=list)
    _signature: StepSignature | None = None
    _where: str = ""
    _mapped: MappedMemory = field(default_factory=MappedMemory, repr=False)
    _open: StepExecution | None = field(default=None, repr=False)
    _replay: StepReplay | None = field(default=None, repr=False)
    _replayed: Recording | None = field(default=None, repr=False)

    @property
    def is_replaying(self) -> bool:
        """Whether the pass under way is replayed: the code of the step must not run, see `kept`."""
        return self.is_open and isinstance(self._open, ReplayPass)

    @property
    def replays(self) -> int:
        """Passes that were replayed so far."""
        return self._replay.replays if self._replay is not None else 0

    @property
    def replay_reasons(self) -> dict[str, int]:
        """Why passes were traced that might have been replayed, with how often."""
        return dict(self._replay.reasons) if self._replay is not None else {}

    @property
    def is_open(self) -> bool:
        """Whether a pass is under way."""
        return self._open is not None and self._open.is_open

    def open(
        self,
        *,
        inputs: Any = None,
        phase: str = "step",
        seed: StepSeed | None = None,
        facts: Mapping[str, Hashable] | None = None,
        where: str = "",
        replay: ReplayRequest | None = None,
    ) -> None:
        """Starts a pass.

        Args:
            inputs: the batch (any nesting of dicts, lists and tensors), to explain compiles by.
            phase: which part of the loop this is.
            seed: the pass's random stream.
            facts: further things that shape the graph.
            where: the place in the run, to announce compiles with.
            replay: what a replay must know of the pass; without it the pass is traced.
        """
        use_random_algorithm(self.config)
        # It holds values of the state, which a pass that is traced has no use for.
        self._replayed = None
        self._where = where
        described = tuple(_describe("", inputs))
        self._signature = StepSignature(phase=phase, inputs=described, facts=tuple((facts or {}).items()))
        options = {"name": self.name, "config": self.config, "hint": self.hint, "graphs": self._graph_names}
        if replay is None or not self._may_replay(replay):
            self._open = self.execution(seed=seed, **options)
        else:
            assert self._replay is not None
            request = Request(
                tensors=PassTensors(replay.batch, replay.extras),
                modules=replay.modules,
                set_modes=replay.set_modes,
                patience=replay.patience,
                bound=replay.bound,
                watched=replay.watched,
                unrelated=replay.unrelated,
                constants=replay.constants,
                several=self.config.steps_per_execution > 1,
                strict=self.config.step_replay != True,  # noqa: E712 (it may be "auto")
            )
            key = (phase, replay.key)
            self._open = self._replay.choose(key, request, seed, **options)
        self._open.open()

    def _may_replay(self, replay: ReplayRequest) -> bool:
        if self.config.step_replay is False or in_step():
            return False
        if replay.change is not None:
            self._make_replay().note(replay.change)
        obstacle = replay.obstacle or own_mode()
        if obstacle is not None and self.config.step_replay == "auto":
            self.refuse_replay(obstacle)
            return False
        self._make_replay()
        return get_backend().replay_works

    def refuse_replay(self, reason: str) -> None:
        """Notes why the next pass is traced without an attempt to replay it later."""
        self._make_replay().refuse(reason)

    def _make_replay(self) -> StepReplay:
        if self._replay is None:
            self._replay = StepReplay(self.name, self.config.replay_verify_every)
            if self.config.steps_per_execution > 1:
                if get_backend().is_spmd():
                    raise UnsupportedOptionError(
                        f"steps_per_execution={self.config.steps_per_execution} under SPMD: the executable of several "
                        "steps is made for one device; leave it out, or leave sharding out"
                    )
                self._replay.together = StepsTogether(
                    self.name,
                    self.config.steps_per_execution,
                    rolled=self.config.steps_form == "loop",
                    backend=get_backend(),
                    note=self._replay.note,
                )
        return self._replay

    def verify_replay(self) -> None:
        """Has the next pass traced, and held against those that were replayed; does nothing if none were."""
        if self._replay is not None:
            self._replay.verify()

    def keep(self, name: str, value: Any) -> None:
        """Notes what the step hands out under a name, so that replays can; does nothing in other passes."""
        if isinstance(self._open, SeparatingScope):
            self._open.keep(name, value)

    def promise(self, name: str) -> Any:
        """In a replayed pass: what the step hands out under a name. Its tensors have no values before `close`."""
        assert isinstance(self._open, ReplayPass)
        return self._open.promise(name)

    def outputs(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a function returns that is all the step does; in a replayed pass it is promised instead of called."""
        if self.is_replaying:
            return self.promise("outputs")
        outputs = function(*args, **kwargs)
        self.keep("outputs", outputs)
        return outputs

    @property
    def left_no_gradients(self) -> bool:
        """Whether the last pass was replayed, and no parameter of its modules has a gradient now."""
        return self._replayed is not None and self._replayed.without_gradients()

    def close(self) -> ScopeReport:
        """Ends the pass: the graph is executed, and a compile is explained in the log."""
        assert self._open is not None
        replayed = isinstance(self._open, ReplayPass)
        self._replayed = self._open.recording if isinstance(self._open, ReplayPass) else None
        report = self._open.close()
        self._open = None
        self.passes += 1
        self._mapped.step_ended(self.name)
        if report.compiles:
            self._record(report, of_several=replayed)
        if self._signature is not None and self._signature not in self._seen:
            self._seen.append(self._signature)
        return report

    def abort(self) -> bool:
        """Discards the pass, if one is open; returns whether one is discarded, here or by its own `close`."""
        execution, self._open = self._open, None
        if execution is None:
            return False
        execution.abort()
        # Ctrl-C while it compiles leaves the pass done.
        self.passes += execution.executed
        return not execution.executed

    def translate(self, error: BaseException) -> Exception | None:
        """What an error raised in the pass means, or `None` if it is not the backend's."""
        return self._open.translate(error) if self._open is not None else None

    def _record(self, report: ScopeReport, *, of_several: bool) -> None:
        self.graphs += report.compiles
        self.compile_seconds += report.compile_seconds
        event = CompileEvent(
            number=self.graphs,
            passes=self.passes,
            graphs=report.compiles,
            seconds=report.compile_seconds,
            reason=self._reason() if not of_several else f"{self.config.steps_per_execution} steps in one executable",
            where=self._where,
        )
        self.events.append(event)
        expected = of_several or all(
            self._signature is None or old.phase != self._signature.phase for old in self._seen
        )
        logger.log(
            logging.INFO if expected else logging.WARNING,
            "%s: compiled graph %d in %.1f s (pass %d%s): %s",
            self.name,
            event.number,
            event.seconds,
            event.passes,
            f", {event.where}" if event.where else "",
            event.reason,
        )

    def _reason(self) -> str:
        assert self._signature is not None
        same_phase = [old for old in self._seen if old.phase == self._signature.phase]
        if not same_phase:
            return f"first pass of the phase {self._signature.phase!r}"
        signature = self._signature
        nearest = min(reversed(same_phase), key=lambda old: len(signature.difference(old)))
        changes = signature.difference(nearest)
        if changes:
            return "; ".join(changes)
        return (
            "the batch looks as before, so something else in the step changed: a Python value that is part of the "
            "graph, train/eval mode, frozen parameters, gradients or optimizer state that were absent before, or two "
            "scalars (a decay rate and a learning rate, say) that happen to be equal and share one input"
        )


def _describe(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, torch.Tensor):
        yield path or "input", f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _describe(f"{path}.{key}" if path else str(key), item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _describe(f"{path}[{index}]", item)
    elif value is not None:
        yield path or "input", repr(value)[:80] if isinstance(value, (bool, int, float, str)) else type(value).__name__
