"""`Watch`: collects what happens in the steps of this process, and ends the script after enough of them."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from xla_adapters import errors
from xla_adapters.config import XLAConfig
from xla_adapters.insight.check.facts import Compile, DtypeUse, Facts, HostOperator, Place, StepFacts, Told
from xla_adapters.open_step import in_step
from xla_adapters.replay.program import StepProgram
from xla_adapters.runtime import Metrics, get_runtime
from xla_adapters.tracing.graph_history import GraphHistory, StepSignature
from xla_adapters.tracing.operation_log import Call, OperationLog, Update
from xla_adapters.tracing.scope_report import ScopeReport
from xla_adapters.tracing.step import Step
from xla_adapters.utils.location import current_location
from xla_adapters.utils.patching import replaced

# Calls of steps that never update (evaluations); with more of them the script is ended, too.
_OTHER_CALLS = 200
_LINE = re.compile(r"(/[^\n:()]*?\.py|[^\s/:()][^\s:()]*\.py|<[^>\n]+>):(\d+)")
# Dtypes that other devices compute in another way than the CPU.
_DTYPES = {torch.float64, torch.float16, torch.complex64, torch.complex128}


class Stop(BaseException):
    """Ends the script: it has run the steps that were asked for. No `Exception`, so that nobody handles it."""


class Watch:
    """Collects facts about steps. What it replaces in this package is put back at the exit of `watching`.

    Args:
        facts: to fill in.
        changed: called when there are new ones.
    """

    def __init__(self, facts: Facts, changed: Callable[[], None]) -> None:
        self.facts = facts
        self._changed = changed
        self._began = time.perf_counter()
        self._in_program = self._replay_given = False
        # When the call before ended, by step; eager operations until now are those between two calls.
        self._ended: dict[str, Metrics] = {}
        self._opened: Metrics | None = None
        self._host_operators: dict[str, int] = {}
        # Where the last backward is, until something else is called at another line.
        self._backward: Place | None = None
        self.when_training_step_ends: Callable[[], None] = lambda: None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which steps are watched, and graph breaks are warnings."""
        around: list[tuple[Any, str, Callable[[Any], Any]]] = [
            (XLAConfig, "__post_init__", self._config),
            (StepProgram, "open", self._open),
            (StepProgram, "close", self._close),
            (Step, "__enter__", self._enter),
            (GraphHistory, "ended", self._note_end),
            (OperationLog, "call", self._operation),
            (warnings, "warn", self._warn),
        ]
        with ExitStack() as stack:
            for owner, name, wrapped in around:
                stack.enter_context(replaced(owner, name, wrapped(getattr(owner, name))))
            yield

    # ---- what is wrapped -------------------------------------------------------------------------

    def _config(self, check: Callable[[XLAConfig], None]) -> Callable[[XLAConfig], None]:
        def checked(config: XLAConfig) -> None:
            for name, value in (("xla_mode", "eager+compile"), ("on_graph_break", "warn"), ("on_recompile", "warn")):
                given = getattr(config, name)
                if name == "xla_mode" and given != value:
                    self.change(f"xla_mode={given!r}: checked as {value!r}, the mode that compiles steps")
                object.__setattr__(config, name, value)
            object.__setattr__(config, "max_graphs", None)
            check(config)

        return checked

    def _open(self, opened: Callable[..., None]) -> Callable[..., None]:
        def open_program(program: StepProgram, **options: Any) -> None:
            self._begin(program.name)
            self._replay_given = options.get("replay") is not None
            opened(program, **options)

        return open_program

    def _close(self, closed: Callable[[StepProgram], ScopeReport]) -> Callable[[StepProgram], ScopeReport]:
        def close_program(program: StepProgram) -> ScopeReport:
            replays, self._in_program = program.replays, True
            try:
                report = closed(program)
            finally:
                self._in_program = False
            if in_step():
                return report
            step = self._step(program.name)
            step.is_managed = True
            step.may_replay |= self._replay_given or bool(program.replay_reasons)
            step.replays += program.replays - replays
            step.reasons.update(program.replay_reasons)
            self._end(program.name, report)
            return report

        return close_program

    def _enter(self, enter: Callable[[Step], Step]) -> Callable[[Step], Step]:
        def enter_step(step: Step) -> Step:
            # Adapters give it a program, which has been counted.
            if type(step) is Step:
                self._begin(step._name or "step")
            return enter(step)

        return enter_step

    def _note_end(self, ended: Callable[..., None]) -> Callable[..., None]:
        def history_ended(
            history: GraphHistory, name: str, signature: StepSignature, report: ScopeReport, *args: Any, **options: Any
        ) -> None:
            is_first = not history.has_graph_of(signature.phase)
            ended(history, name, signature, report, *args, **options)
            if report.compiles:
                call, reason = self._step(name).calls + 1, history.events[-1].reason
                self.facts.compiles.append(
                    Compile(step=name, call=call, seconds=report.compile_seconds, reason=reason, is_first=is_first)
                )
                self._note_dtypes(signature, report.operations)
            if not self._in_program and not in_step():
                self._end(name, report)

        return history_ended

    def _operation(self, call: Callable[..., None]) -> Callable[..., None]:
        def noted(log: OperationLog, function: Any, *args: Any) -> None:
            call(log, function, *args)
            counts = get_runtime().counters.host_operators()
            names = sorted(name for name, count in counts.items() if count > self._host_operators.get(name, 0))
            self._host_operators = counts
            place = _line_of_user()
            if names:
                # A backward is noted when it begins, other calls when they have ended.
                self._note_host_operators(names, self._backward or place)
            if function is torch.Tensor.backward:
                self._backward = place
            elif place != self._backward:
                self._backward = None

        return noted

    def _warn(self, warn: Callable[..., None]) -> Callable[..., None]:
        def noted(
            message: Any, category: type[Warning] | None = None, stacklevel: int = 1, source: Any = None, **options: Any
        ) -> None:
            kind = type(message) if isinstance(message, Warning) else category
            if kind is not None and kind.__module__ == errors.__name__:
                text = str(message)
                told = Told(category=kind.__name__, message=text, place=place_in(text))
                if told not in self.facts.told:
                    self.facts.told.append(told)
            warn(message, category, stacklevel=stacklevel + 1, source=source, **options)

        return noted

    # ---- what is noted ---------------------------------------------------------------------------

    def change(self, text: str) -> None:
        """Notes that something of the script was replaced."""
        if text not in self.facts.changed:
            self.facts.changed.append(text)

    def skip(self, text: str) -> None:
        """Notes that something was not saved."""
        if text not in self.facts.skipped:
            self.facts.skipped.append(text)

    def _step(self, name: str) -> StepFacts:
        return self.facts.steps.setdefault(name, StepFacts())

    def _begin(self, name: str) -> None:
        if in_step():
            # It is a part of the outer step, in which nothing may wait for the device.
            return
        others = sum(step.calls for step in self.facts.steps.values() if not step.updates)
        if self.facts.done >= self.facts.asked or others >= _OTHER_CALLS:
            raise Stop
        runtime = get_runtime()
        if not runtime.device.started():
            return
        self._opened = runtime.counters.metrics()
        self._host_operators = runtime.counters.host_operators()
        if name in self._ended:
            between = self._opened.eager_ops - self._ended[name].eager_ops
            self._step(name).eager_operations.append(between)

    def _end(self, name: str, report: ScopeReport) -> None:
        step = self._step(name)
        step.calls += 1
        if step.updates or any(isinstance(entry, Update) for entry in report.operations.entries):
            step.updates += 1
            self.when_training_step_ends()
        now = get_runtime().counters.metrics()
        if self._opened is not None:
            step.executions.append(now.executions - self._opened.executions)
        self._ended[name] = now
        self.facts.seconds = time.perf_counter() - self._began
        self._changed()

    def _note_host_operators(self, names: list[str], place: Place) -> None:
        known = next((item for item in self.facts.host_operators if item.names == names and item.place == place), None)
        if known is not None:
            known.calls += 1
        else:
            self.facts.host_operators.append(HostOperator(names=names, place=place))

    def _note_dtypes(self, signature: StepSignature, operations: OperationLog) -> None:
        wanted = {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES}
        for name, form in signature.inputs:
            dtype = form.rpartition(" ")[2]
            if dtype in wanted or dtype == "int64":
                self._note_dtype(dtype, f"the batch ({name})", Place())
        for entry in operations.entries:
            if isinstance(entry, Call) and isinstance(entry.form, tuple) and len(entry.form) == 3:
                dtype = str(entry.form[1]).removeprefix("torch.")
                if dtype in wanted:
                    name = getattr(entry.function, "__name__", str(entry.function))
                    self._note_dtype(dtype, name, Place(file=entry.file, line=entry.line))

    def _note_dtype(self, dtype: str, what: str, place: Place) -> None:
        # What comes after has it from the first.
        for use in self.facts.dtypes:
            if use.dtype == dtype and (use.place.line > 0) == (place.line > 0) and (place.line or use.what == what):
                use.count += 1
                return
        self.facts.dtypes.append(DtypeUse(dtype=dtype, what=what, place=place))


def _line_of_user() -> Place:
    location = current_location()
    where = location.called_from or location if location is not None else None
    return Place() if where is None else Place(file=where.filename, line=where.lineno)


def place_in(message: str) -> Place:
    """The line that a message names: the last one, which is that of the user's code."""
    found = _LINE.findall(message)
    return Place(file=found[-1][0], line=int(found[-1][1])) if found else Place()
