"""`StepProgram`: one step of a training loop, over all its calls. Counts them, and explains each compile in the log."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch

from xla_adapters.config import XLAConfig
from xla_adapters.errors import ReplayMismatchError, ReplayMismatchWarning
from xla_adapters.open_step import in_step
from xla_adapters.replay.call_spec import CallSpec
from xla_adapters.replay.executable_scope import SeparatingScope
from xla_adapters.replay.guards.process_modes import unknown_mode
from xla_adapters.replay.launcher import Launcher
from xla_adapters.replay.placeholders.capture import PlaceholderCapture
from xla_adapters.replay.placeholders.trace_or_replay import PlaceholderTraceOrReplay
from xla_adapters.replay.replayed_call import ReplayedCall
from xla_adapters.replay.trace_or_replay import TraceOrReplay
from xla_adapters.runtime import get_runtime
from xla_adapters.runtime.extensions import extensions
from xla_adapters.runtime.rng import StepSeed, apply_process_options
from xla_adapters.runtime.transfers import name_tensors
from xla_adapters.tracing.compile_events import CompileEvent
from xla_adapters.tracing.graph_history import CallNumber, GraphHistory, StepSignature
from xla_adapters.tracing.make_scope import make_scope
from xla_adapters.tracing.scope_report import ScopeReport
from xla_adapters.tracing.step_profile import FORWARD, REPLAY, StepProfile
from xla_adapters.tracing.step_scope import StepScope
from xla_adapters.utils.patching import with_stack_room


class StepExecution(Protocol):
    """How one call of a step is executed: traced (`StepScope`), or replayed (`ReplayedCall`)."""

    @property
    def is_open(self) -> bool: ...
    @property
    def executed(self) -> bool: ...
    def open(self) -> None: ...
    def close(self) -> ScopeReport: ...
    def abort(self) -> None: ...
    def translate(self, error: BaseException) -> Exception | None: ...


@dataclass
class StepProgram:
    """A step that is called many times: traces, compiles and replays it, and explains its compiles.

    `CompiledStep` and the trainers are made of it. Use it to adapt another training loop: `open` before the code of the
    step, `close` after it, `abort` if it raises.

    Args:
        name: of the step, for messages and dumps.
        config: the options.
        hint: for messages: where in the host framework a value can be read.
        execution: makes the execution of a call that is not replayed; `make_scope` by default.

    Attributes:
        calls: how many calls there were.
        flops: of all calls together, where they are known (see `GraphAnalysis`).
        without_flops: how many calls they are not known of.
    """

    name: str
    config: XLAConfig
    hint: str = ""
    execution: Callable[..., StepExecution] = make_scope
    calls: int = 0
    flops: int = 0
    without_flops: int = 0
    _history: GraphHistory = field(default_factory=GraphHistory, repr=False)
    _signature: StepSignature = field(default_factory=StepSignature, repr=False)
    _where: str = ""
    _checkpoints: list[tuple[int, str]] = field(default_factory=list, repr=False)
    _open: StepExecution | None = field(default=None, repr=False)
    _replay: TraceOrReplay | None = field(default=None, repr=False)
    _replayed: Launcher | None = field(default=None, repr=False)

    @cached_property
    def _step_observers(self) -> list[Callable[[str], None]]:
        # Not when the program is made: a decorated step must not import torch_xla, which reads the environment.
        observers = (extension.step_observer(get_runtime().device) for extension in extensions())
        return [observer for observer in observers if observer is not None]

    @cached_property
    def _profile(self) -> StepProfile | None:
        return StepProfile(self.name, self.config) if self.config.profile_steps is not None else None

    @property
    def graphs(self) -> int:
        """How many graphs were compiled."""
        return self._history.graphs

    @property
    def compile_seconds(self) -> float:
        """How many seconds that took."""
        return self._history.seconds

    @property
    def events(self) -> list[CompileEvent]:
        """The calls that compiled."""
        return self._history.events

    @property
    def is_replaying(self) -> bool:
        """Whether the open call is replayed: then the code of the step must not run; see `promise`."""
        return self.is_open and isinstance(self._open, ReplayedCall)

    @property
    def replays(self) -> int:
        """How many calls were replayed so far."""
        return self._replay.replays if self._replay is not None else 0

    @property
    def verified(self) -> int:
        """How many calls were traced to verify the replays before them; each of them reads once from the device."""
        return self._replay.verified if self._replay is not None else 0

    @property
    def replay_reasons(self) -> dict[str, int]:
        """Why calls were traced that might have been replayed, with how often."""
        return dict(self._replay.reasons) if self._replay is not None else {}

    @property
    def is_open(self) -> bool:
        """Whether a call is open."""
        return self._open is not None and self._open.is_open

    def open(
        self,
        *,
        inputs: Any = None,
        phase: str = "step",
        seed: StepSeed | None = None,
        facts: Mapping[str, Hashable] | None = None,
        where: str = "",
        replay: CallSpec | None = None,
    ) -> None:
        """Begins a call.

        Args:
            inputs: the batch (any nesting of dicts, lists and tensors), to explain compiles.
            phase: which part of the loop this is.
            seed: where the random numbers of the call start; by default the device's stream continues.
            facts: further things that shape the graph.
            where: the position in the run, for the log.
            replay: describes the call for a replay; without it the call is traced.
        """
        apply_process_options(self.config)
        if self._profile is not None:
            self._profile.before_call()
        # It references values of the state, which a traced call would have to keep.
        self._replayed = None
        self._where = where
        self._signature = StepSignature.of(phase, inputs, facts or {})
        options = {"name": self.name, "config": self.config, "hint": self.hint}
        options |= {"history": self._history, "signature": self._signature}
        if replay is None or self.config.step_replay is False or in_step():
            self._open = self.execution(seed=seed, **options)
        else:
            spec = dataclasses.replace(replay, strict=self.config.step_replay is not True)
            self._open = self._replayable(phase, spec, seed, options)
        is_replay = isinstance(self._open, ReplayedCall)
        if not is_replay:
            name_tensors(inputs)
        if self._profile is not None:
            self._profile.name_span(REPLAY if is_replay else FORWARD)
        self._open.open()

    def _replayable(self, phase: str, spec: CallSpec, seed: StepSeed | None, options: dict[str, Any]) -> StepExecution:
        """The execution of a call that is replayed if nothing is in the way."""
        decision = self._make_replay()
        if spec.change is not None:
            decision.note(spec.change)
        reason = spec.reason or unknown_mode()
        if reason is not None and self.config.step_replay == "auto":
            decision.refuse(reason)
            scope = decision.refused(spec, seed=seed, **options)
            return scope if scope is not None else self.execution(seed=seed, **options)
        if not get_runtime().replay_works:
            return self.execution(seed=seed, **options)
        choice: StepExecution = decision.choose((phase, spec.key, _repeated(spec.batch)), spec, seed, **options)
        return choice

    def refuse_replay(self, reason: str) -> None:
        """Notes why the next call is traced without an attempt to replay it later."""
        self._make_replay().refuse(reason)

    def _make_replay(self) -> TraceOrReplay:
        if self._replay is None:
            kind = PlaceholderTraceOrReplay if get_runtime().has_placeholders else TraceOrReplay
            self._replay = kind(
                self.name,
                self.config.replay_verify_every,
                calls=lambda: self.calls,
                on_mismatch=self._on_replay_mismatch,
            )
        return self._replay

    def note_checkpoint(self, path: str) -> None:
        """Notes a checkpoint with the results of all calls so far, for the message of a replay mismatch."""
        self._checkpoints.append((self.calls, path))

    def _on_replay_mismatch(self, difference: str, trusted: int) -> None:
        saved = [path for calls, path in self._checkpoints if calls <= trusted]
        error = ReplayMismatchError(
            self.name,
            difference,
            trusted_steps=trusted,
            steps=self.calls,
            checkpoint=saved[-1] if saved else None,
        )
        if self.config.on_replay_mismatch == "error":
            raise error
        warnings.warn(str(error), ReplayMismatchWarning, stacklevel=2)

    def verify_replay(self) -> None:
        """Has the next call traced and compared with what its replay computes; does nothing if none was replayed."""
        if self._replay is not None:
            self._replay.verify()

    def keep(self, name: str, value: Any) -> None:
        """Notes a value that the step returns under a name, so that replays can return it too.

        Does nothing in calls that cannot be replayed.
        """
        if isinstance(self._open, (SeparatingScope, PlaceholderCapture)):
            self._open.keep(name, value)

    def end_at_reads(self, end: Callable[[bool], bool]) -> None:
        """Lets the open call end where a value is read, if it may: for loops that do not say where a step ends.

        Args:
            end: see `StepScope.end_at_reads`.
        """
        if isinstance(self._open, StepScope):
            self._open.end_at_reads(end)

    def promise(self, name: str) -> Any:
        """In a replayed call: the value that the step returns under a name. Its tensors have values after `close`."""
        assert isinstance(self._open, ReplayedCall)
        return self._open.promise(name)

    def outputs(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of a function that is the complete step. In a replayed call the function is not called."""
        if self.is_replaying:
            return self.promise("outputs")
        outputs = function(*args, **kwargs)
        self.keep("outputs", outputs)
        return outputs

    @property
    def left_no_gradients(self) -> bool:
        """Whether the last call was replayed, and no parameter of its modules has a gradient now."""
        return self._replayed is not None and self._replayed.without_gradients()

    def close(self) -> ScopeReport:
        """Ends the call: executes the graph, and explains a compile in the log."""
        assert self._open is not None
        self._replayed = self._open.launcher if isinstance(self._open, ReplayedCall) else None
        verified = self.verified
        report = self._open.close()
        self._open = None
        self.calls += 1
        for step_ended in self._step_observers:
            step_ended(self.name)
        self._record(report, self._replayed, verified=self.verified > verified)
        if self._profile is not None:
            self._profile.after_call()
        return report

    @with_stack_room
    def abort(self) -> bool:
        """Discards the open call, if there is one; returns whether one was discarded, here or by its own `close`."""
        execution, self._open = self._open, None
        try:
            if execution is None:
                return False
            execution.abort()
        finally:
            if self._profile is not None:
                self._profile.stop()
        # After Ctrl-C during its compile the call counts as done.
        self.calls += execution.executed
        return not execution.executed

    def translate(self, error: BaseException) -> Exception | None:
        """The error to raise in place of one raised in the open call; `None` to raise that one."""
        return self._open.translate(error) if self._open is not None else None

    def _record(self, report: ScopeReport, replayed: Launcher | None, *, verified: bool) -> None:
        call = CallNumber(self.calls, self._where)
        if replayed is None:
            flops = report.graph.flops if report.graph is not None else None
            warns = self.config.on_recompile != "ignore"
            # After replays a traced call may have another graph that computes the same.
            known = "it was traced to verify the replays before it (replay_verify_every)" if verified else ""
            self._history.ended(self.name, self._signature, report, call, known, warns=warns)
        else:
            flops = replayed.call.flops
        if flops is None:
            self.without_flops += 1
        else:
            self.flops += flops


def _repeated(batch: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """For each tensor of a batch the position of the first one that is the same device tensor."""
    runtime = get_runtime()
    number = runtime.lazy.tensor_number if runtime.has_lazy_tensors else id
    first: dict[int, int] = {}
    return tuple(first.setdefault(number(tensor), position) for position, tensor in enumerate(batch))
