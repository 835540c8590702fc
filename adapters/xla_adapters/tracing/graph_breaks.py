"""`GraphBreaks`: applies `on_graph_break` to reads, syncs and profiler scopes inside a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

import torch

from xla_adapters.errors import BreakKind, GraphBreakError
from xla_adapters.runtime import Runtime, RuntimeEvent
from xla_adapters.tracing.allowed_reads import AllowedReads
from xla_adapters.tracing.break_policy import Break, BreakPolicy, ProfilerScopes, classify_read, kind_of_error
from xla_adapters.tracing.forward_lines import ENGINE, failed_call, line_by_name, refused_function
from xla_adapters.tracing.library_reads import LibraryReads, library_reads
from xla_adapters.tracing.operation_log import OperationLog
from xla_adapters.tracing.remedies import SEARCH_FOR_NAN, TENSOR_AS_RATE
from xla_adapters.tracing.undo_log import UndoLog
from xla_adapters.utils.location import Location, current_location, location_of, location_of_line

# The folder of torch's optimizers.
_OPTIMIZERS = "/torch/optim/"


class GraphBreaks:
    """Handles what would execute part of a step's graph before the step ends.

    Args:
        policy: raises, warns or lets pass.
        runtime: the runtime.

    Attributes:
        found: whether there was a graph break in the step.
        flushed: whether part of the graph was executed before the end of the step.
        executing: whether the step itself executes its graph: syncs are no graph breaks meanwhile.
        allowed_reads: reads that known libraries may make; None if there are none.
        end_early: called before what would break the graph; ends the step if it may end there, and returns whether it
            has ended. Called with True where the break is an error. None if steps end only where their code ends.
    """

    def __init__(self, policy: BreakPolicy, runtime: Runtime) -> None:
        self._policy = policy
        self._runtime = runtime
        self._undo_logs: Callable[[], Sequence[UndoLog]] = list
        # Of the process when the step began, plus those of `flush`.
        self._compiles = 0
        self._on_host: dict[str, int] = {}
        self._profiler_scopes = ProfilerScopes(policy, runtime)
        # The first call that was refused: its name and line. If its error is caught, the step goes on.
        self._refused: tuple[str, Location | None] | None = None
        self.found = False
        self.flushed = False
        self.executing = False
        self.allowed_reads: AllowedReads | None = None
        self.end_early: Callable[[bool], bool] | None = None
        self._reads: LibraryReads | None = None

    def begin(self, undo_logs: Callable[[], Sequence[UndoLog]]) -> None:
        """The step begins to be traced.

        Args:
            undo_logs: returns the undo logs of all open steps.
        """
        self._undo_logs = undo_logs
        self._reads = library_reads()
        self.allowed_reads = None
        if self._reads is not None:
            self.allowed_reads = AllowedReads(self._reads, self, self._runtime)
            self._reads.on_host = self.allowed_reads.on_host
        self._compiles = self._runtime.counters.compile_totals()[0]
        self._on_host = self._runtime.counters.host_operators()

    def end(self, *, executed: bool) -> None:
        """The step is not traced any more. Drops the reference to it, so that no reference cycle keeps its tensors.

        Args:
            executed: whether its graph was executed; otherwise the step is discarded.
        """
        if self.allowed_reads is not None and self._reads is not None:
            self._reads.on_host = None
            self._reads.host_values.end_step()
            deferred, on_host, self.allowed_reads = self.allowed_reads.deferred, self.allowed_reads.noted, None
            if on_host is not None:
                on_host.is_open = False
            if executed:
                deferred.executed()
            else:
                deferred.discard()
        self._undo_logs = list
        self.executing = False

    def ends(self) -> bool:
        """Ends the step if it may end here; returns whether it has ended."""
        return self.end_early is not None and self.end_early(False)

    def _meet(self, kind: BreakKind, what: str, *, ready: bool = False) -> None:
        try:
            self._policy.meet(kind, what, self._runtime, ready=ready)
        except GraphBreakError:
            if self.end_early is not None:
                self.end_early(True)
            raise

    def on_read(self, what: str, tensor: torch.Tensor, kind: BreakKind | None = None) -> None:
        """A value is about to be read on the host; executes what is pending if the tensor is.

        Args:
            what: the call, as the user knows it.
            tensor: whose value is read.
            kind: of the break; found from the call stack if not given.

        Raises:
            GraphBreakError: the subclass for the kind, under `on_graph_break="error"`.
        """
        if self.ends():
            return
        pending = self._runtime.tracing.is_pending(tensor)
        reader = None if self._reads is None else self._reads.reader()
        if reader is None:
            self._meet(classify_read() if kind is None else kind, what, ready=not pending)
        elif pending:
            self._policy.tell_of_split(what, reader)
        # Reads made of several operations execute more than what is flushed here; that is reported already.
        self.found = True
        if pending:
            self.flush()

    def on_dynamic(self, what: str, tensor: torch.Tensor) -> None:
        """As `on_read`, for an operation whose result has a shape that depends on the tensor's values."""
        self.on_read(what, tensor, BreakKind.HIDDEN_EXECUTION)

    def on_refusal(self, called: str) -> None:
        """The runtime has refused to execute for a call of torch; its error is about to be raised.

        Args:
            called: the name of torch's function.
        """
        if self._refused is None:
            self._refused = called.strip("_"), current_location()

    def meet(self, kind: BreakKind, what: str) -> None:
        """Reports a break that the caller is about to cause, and executes what is pending.

        Raises:
            GraphBreakError: the subclass for `kind`, under `on_graph_break="error"`.
        """
        if self.ends():
            return
        self._meet(kind, what)
        self.found = True
        self.flush()

    def on_runtime_event(self, event: RuntimeEvent, subject: object) -> bool:
        """User code or a library syncs, waits for the device, or opens or closes a profiler scope.

        Returns:
            Whether that is to happen. A known library syncs before it reads; its reads are allowed without that.

        Raises:
            GraphBreakError: the subclass for the kind, under `on_graph_break="error"`.
        """
        if self.executing or self.ends():
            return True
        if event is RuntimeEvent.SYNC and self._reads is not None and self._reads.reader() is not None:
            return False
        if event is RuntimeEvent.PROFILER_ENTER:
            self._profiler_scopes.enter(subject)
        elif event is RuntimeEvent.PROFILER_EXIT:
            self._profiler_scopes.exit(subject)
        else:
            kind = classify_read()
            what = "wait for the device" if event is RuntimeEvent.WAIT else "sync (mark_step)"
            if kind is BreakKind.TENSOR_READ:
                kind = BreakKind.DEVICE_SYNC
            elif kind is BreakKind.PROFILER_SCOPE:
                what = "a profiler scope that syncs the device when it closes (StepTrace)"
            self._meet(kind, what)
            if event is RuntimeEvent.SYNC:
                self.flush()
        return True

    def translate(self, error: BaseException, operations: OperationLog) -> GraphBreakError | None:
        """The error to raise in place of the runtime's for an execution that it refused; `None` for other errors.

        Args:
            error: the runtime's.
            operations: what the step called.
        """
        tracing = self._runtime.tracing
        if self._refused is not None and tracing.is_lost_value(error):
            return self._policy.error(self._caught(self._refused, self._new_host_operators()))
        if not tracing.is_forbidden_execution(error):
            return None
        names, pending = self._new_host_operators(), tracing.pending_count()
        location, backward = location_of(error.__traceback__), None
        cause = "" if names else _cause(error.__traceback__, self._runtime)
        called = cause or refused_function(error.__traceback__)
        with torch.no_grad(), torch._C.DisableTorchFunction():
            forward = failed_call(error.__traceback__, operations, names, tracing.is_forbidden_execution)
        if forward is not None and not cause:
            location, backward = location_of_line(forward.file, forward.line), location
            called = getattr(forward.function, "__name__", "")
        return self._policy.error(
            Break(
                kind=BreakKind.HOST_OPERATOR if names else kind_of_error(error),
                what=_on_host(names) if names else _hidden(called),
                location=location,
                pending=pending,
                backward=backward,
                operators=(*names, called),
            )
        )

    def _new_host_operators(self) -> list[str]:
        """The operators that were computed on the host in this step, or are about to be."""
        counts = self._runtime.counters.host_operators()
        return sorted(name for name, count in counts.items() if count > self._on_host.get(name, 0))

    def flush(self) -> None:
        """Executes all that is pending, so that the rest of the step need not compute it again."""
        self.flushed = True
        for undo_log in self._undo_logs():
            undo_log.forget_executed()
        before = self._runtime.counters.compile_totals()
        allowed = self._runtime.tracing.execution_allowed()
        self._runtime.tracing.set_execution_allowed(True)
        self.executing = True
        try:
            self._runtime.tracing.flush()
        finally:
            self.executing = False
            self._runtime.tracing.set_execution_allowed(allowed)
        self._compiles += self._runtime.counters.compile_totals()[0] - before[0]

    def check_end(self, operations: OperationLog) -> None:
        """The step's code has run: adds the numbers that it deferred to the graph, and reports what can be told now.

        Args:
            operations: what the step called.

        Raises:
            ProfilerScopeError: a profiler scope is still open, under `on_graph_break="error"`.
            GraphBreakError: an operator was computed on the host, of values that were there, under "error".
        """
        operations.was_split = self.flushed
        self._profiler_scopes.refuse_open_ones()
        if self.allowed_reads is not None:
            self.allowed_reads.deferred.before_execution()
        # After a flush operators run one by one (an optimizer that cannot be traced), some of them on the host.
        names = [] if self.found or self.flushed else self._new_host_operators()
        compiled = self._runtime.counters.compile_totals()[0] > self._compiles
        pending = self._runtime.tracing.pending_count() if names or compiled else 0
        if names and self._refused is not None:
            self._policy.tell(self._caught(self._refused, names))
        elif names:
            self._policy.tell(
                Break(
                    kind=BreakKind.HOST_OPERATOR,
                    what=_on_host(names),
                    location=line_by_name(operations, names),
                    pending=pending,
                    ready=not compiled,
                    operators=tuple(names),
                )
            )
        elif compiled and not self.found and self._policy.mode == "warn":
            what = "an operation read a value inside C++, where its line cannot be told"
            self._policy.tell(Break(kind=BreakKind.HIDDEN_EXECUTION, what=what, location=None, pending=pending))

    def _caught(self, refused: tuple[str, Location | None], names: list[str]) -> Break:
        """What was refused, while the code went on with the step.

        Args:
            refused: name and line of the call.
            names: of the operators that were about to be computed on the host.
        """
        called, location = refused
        return Break(
            kind=BreakKind.HOST_OPERATOR if names else BreakKind.HIDDEN_EXECUTION,
            what=f"{_on_host(names) if names else _hidden(called)}; the code caught the error and went on",
            location=location,
            pending=self._runtime.tracing.pending_count(),
            operators=(*names, called),
        )


def _cause(traceback: TracebackType | None, runtime: Runtime) -> str:
    """Why torch itself has read a value: to look for NaN, or for a learning rate; empty if for neither."""
    looks_for_nan = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
    while traceback is not None:
        frame, traceback = traceback.tb_frame, traceback.tb_next
        if looks_for_nan and frame.f_code.co_name == ENGINE:
            return SEARCH_FOR_NAN
        rate = frame.f_locals.get("lr") if _OPTIMIZERS in frame.f_code.co_filename else None
        if isinstance(rate, torch.Tensor) and runtime.device.owns(rate):
            return TENSOR_AS_RATE
    return ""


def _on_host(names: list[str]) -> str:
    several = len(names) > 1
    return f"the operator{'s' if several else ''} {', '.join(names)}, which torch_xla computes on the host"


def _hidden(called: str) -> str:
    if called in (SEARCH_FOR_NAN, TENSOR_AS_RATE):
        return called
    if called == "to":
        return "the gradient of a tensor on the host, which the step copies to the device: the backward copies it back"
    function = f"{called}, " if called and called != "backward" else ""
    return f"{function}an operation whose result depends on values (a shape, a length)"
