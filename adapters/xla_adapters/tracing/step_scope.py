"""`StepScope`: traces the code inside it as one graph, and executes that graph once at the end.

Implements the step of RFC pytorch/xla#6751: nothing is executed before the step ends, everything has been executed
after it, and a step that ends early by an error changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType

import torch

from xla_adapters.config import XLAConfig
from xla_adapters.errors import (
    BreakKind,
    ConcurrentStepError,
    DeviceOutOfMemoryError,
    UnsupportedOptionError,
    XLAAdapterError,
)
from xla_adapters.open_step import begin_only_step, end_only_step, open_step
from xla_adapters.runtime import Runtime, RuntimeEvent, get_runtime
from xla_adapters.runtime.extensions import extensions
from xla_adapters.runtime.rng import StepSeed
from xla_adapters.tracing.activation_checkpointing import checkpointing_on_device
from xla_adapters.tracing.break_policy import BreakPolicy
from xla_adapters.tracing.compile_progress import compile_progress
from xla_adapters.tracing.discarding import Discarding
from xla_adapters.tracing.graph_analysis import GraphAnalysis
from xla_adapters.tracing.graph_breaks import GraphBreaks
from xla_adapters.tracing.graph_history import GraphHistory, StepSignature, check_pending_graph, history_of
from xla_adapters.tracing.interrupts import InterruptGuard, at_edge
from xla_adapters.tracing.list_updates import ListUpdates, updates_of_lists
from xla_adapters.tracing.operation_log import OperationLog
from xla_adapters.tracing.scope_report import NOTHING_COMPILED, CompileMeter, ScopeReport
from xla_adapters.tracing.step_hooks import ModuleGuard, UpdateGuard
from xla_adapters.tracing.step_mode import StepMode
from xla_adapters.tracing.undo_log import UndoLog, note_updated, own_buffers_for_update
from xla_adapters.utils.patching import with_stack_room
from xla_adapters.utils.torch_modes import as_in_one_graph, inference_mode_as_no_grad, without_dispatch_modes


def keep_switches(runtime: Runtime, restores: ExitStack) -> None:
    """Has the present switches of the runtime set again when `restores` is closed.

    Raises:
        UnsupportedOptionError: the runtime has no lazy tensors, whose switches they are.
    """
    if runtime.has_placeholders:
        raise UnsupportedOptionError(
            f"StepScope: with {runtime.name} the scope of a step is an object of another class; use xla_adapters.step()"
        )
    tracing = runtime.tracing
    restores.callback(tracing.set_graph_name, tracing.graph_name())
    restores.callback(tracing.set_execution_allowed, tracing.execution_allowed())
    restores.callback(tracing.set_eager, tracing.eager())
    restores.callback(tracing.set_constant_scalars, tracing.constant_scalars())


def restore_state(runtime: Runtime, undo_log: UndoLog, seeds: tuple[int, torch.Tensor] | None) -> None:
    """Discards the pending graph of a step, and restores the state from before it.

    Args:
        runtime: the runtime.
        undo_log: the step's, with those of steps inside it.
        seeds: of the device and the host before the step; None if the step had not come to note them.
    """
    eager = runtime.tracing.eager()
    # Reading the state of a tensor may update its views, which is an operation to be discarded with the rest.
    runtime.tracing.set_eager(False)
    try:
        # From here on, each use of a tensor that the step made raises; restoring gradients of such leaves too.
        with torch._C.DisableTorchFunction():
            undo_log.undo(discard=True)
    finally:
        runtime.tracing.set_eager(eager)
    if seeds is not None:
        # The device's seed too: otherwise it would be a value of the discarded graph.
        runtime.random.set_seed(seeds[0])
        torch.set_rng_state(seeds[1])
    # Cached casts of weights are values of the discarded graph as well.
    torch.clear_autocast_cache()


def current_scope() -> StepScope | None:
    """The outermost step scope that this thread is in; `None` outside of steps."""
    scope = open_step.step
    assert scope is None or isinstance(scope, StepScope)
    return scope


def when_step_ends(undo: Callable[[], None]) -> None:
    """Registers a function to be called when the current step of this thread ends, normally or by an error."""
    scope = current_scope()
    assert scope is not None
    scope._restores.callback(undo)


class StepScope:
    """One traced call of a step. User code enters it by `xla_adapters.step()`; adapters open and close it themselves.

    Args:
        name: of the step, for messages and graph dumps.
        config: the options; `XLAConfig()` if not given.
        seed: where the random numbers of this call start; by default the device's stream continues.
        hint: for messages: where in the host framework a value can be read.
        history: the graphs of the step; by default those of all steps of this name.
        signature: what is known of this call from outside.
    """

    def __init__(
        self,
        *,
        name: str = "step",
        config: XLAConfig | None = None,
        seed: StepSeed | None = None,
        hint: str = "",
        history: GraphHistory | None = None,
        signature: StepSignature | None = None,
    ) -> None:
        self.name = name
        self.history = history_of(name) if history is None else history
        self.signature = StepSignature() if signature is None else signature
        self.operations = OperationLog()
        self._graph: GraphAnalysis | None = None
        self.config = config if config is not None else XLAConfig()
        self._seed = seed
        self._runtime: Runtime = get_runtime()
        policy = BreakPolicy(self.config.on_graph_break, name, hint, splits=self._runtime.splits_steps)
        self._breaks = GraphBreaks(policy, self._runtime)
        self._outer: StepScope | None = None
        self._outer_undo_log: UndoLog | None = None
        self._undo_log = UndoLog(self._runtime)
        self._mode: StepMode | None = None
        self._interrupts = InterruptGuard()
        self._restores = ExitStack()
        self._seeds_before: tuple[int, torch.Tensor] | None = None
        self._is_open = self._executed = False
        self._list_updates = ListUpdates()
        self._lists = ExitStack()

    @property
    def executed(self) -> bool:
        """Whether the graph was handed to the device, even if an error followed (Ctrl-C while it compiles)."""
        return self._executed

    @property
    def is_open(self) -> bool:
        """Whether the scope has been opened and neither closed nor aborted."""
        return self._is_open

    @property
    def is_current(self) -> bool:
        """Whether this thread is in this scope (the outermost of nested ones)."""
        return open_step.step is self

    @property
    def is_recording(self) -> bool:
        """Whether writes to tensors are recorded in the undo log."""
        return self._mode is not None

    @property
    def forbids_breaks(self) -> bool:
        """Whether a graph break is an error."""
        return self.config.on_graph_break == "error"

    @at_edge
    @with_stack_room
    @without_dispatch_modes
    def open(self) -> None:
        """Starts tracing. Inside another scope, only starts a new undo log.

        Raises:
            ConcurrentStepError: another thread is inside a step, or this scope is open already.
        """
        if self._is_open:
            raise ConcurrentStepError(f"the step {self.name!r} is open already")
        outer = current_scope()
        if outer is not None:
            self._is_open, self._outer = True, outer
            assert outer._mode is not None
            self._outer_undo_log = outer._mode.undo_log
            self._undo_log = outer._mode.undo_log = UndoLog(self._runtime, enclosing=self._outer_undo_log)
            return
        # Ctrl-C below would leave the process to a step that has ended.
        self._interrupts.install()
        try:
            begin_only_step(self)
            self._is_open = True
            self._runtime.device.initialize()
            with torch.no_grad(), torch._C.DisableTorchFunction():
                if self._runtime.has_shared_buffers:
                    self._runtime.shared_buffers.separate_state()
            self._start_tracing()
        except BaseException:
            if self._is_open:
                self._stop_tracing()
            self._interrupts.finish()
            raise
        open_step.step = self

    @at_edge
    @with_stack_room
    @without_dispatch_modes
    def close(self) -> ScopeReport:
        """Stops tracing and executes the graph.

        After an error that comes once the graph was handed to the device (Ctrl-C while it compiles), the step counts
        as done. Any other error discards it.

        Raises:
            ProfilerScopeError: a profiler scope opened inside is still open; the step is discarded.
            GraphLimitError: the graph would be one more than `max_graphs`; the step is discarded.
        """
        if not self._is_open:
            return NOTHING_COMPILED
        if self._outer is not None:
            return self._close_inner(self._outer)
        self._merge_inner_logs()
        try:
            self._interrupts.check()
            report = self._finish_graph()
        except BaseException as error:
            if self._breaks.executing and not self._runtime.tracing.pending_count():
                # The graph has been executed and the old values' buffers are gone: nothing can be restored.
                self._executed = True
                self._undo_log.clear()
                self._stop_tracing()
                self._interrupts.finish()
                raise
            translated = self.translate(error)
            self.abort()
            if translated is not None:
                raise translated from error
            raise
        self._executed = True
        self._stop_tracing()
        self._undo_log.free_later()
        self._interrupts.finish()
        return report

    @at_edge
    def _close_inner(self, outer: StepScope) -> ScopeReport:
        """Leaves a step inside another one: its operations become part of the outer step's graph."""
        if not outer.is_open:
            self._is_open = False
            raise ConcurrentStepError(
                f"the step {self.name!r} is inside the step {outer.name!r}, which has ended before it; steps must "
                "be left in the reverse order of their entry (a generator that is suspended inside a step?)"
            )
        self._leave_inner()
        assert self._outer_undo_log is not None
        self._undo_log.merge_into(self._outer_undo_log)
        # A value that it still referenced would become an output of the outer step's graph.
        self._undo_log.clear()
        return NOTHING_COMPILED

    @at_edge
    def _finish_graph(self) -> ScopeReport:
        """Completes the graph and executes it."""
        runtime, undo_log = self._runtime, self._undo_log
        self._breaks.check_end(self.operations)
        if self.config.free_grads is True:
            undo_log.free_grads()
        self.stop_recording()
        undo_log.apply_writes()
        undo_log.restate_dtypes(self._list_updates.parameters)
        undo_log.detach_new_grads()
        check_pending_graph(self.name, self.config, (self.signature, self.operations), self.history, undo_log, runtime)
        runtime.tracing.set_execution_allowed(True)
        self._breaks.executing = True
        with torch.no_grad(), torch._C.DisableTorchFunction():
            written = own_buffers_for_update(undo_log, runtime)
        meter = CompileMeter(runtime)
        with compile_progress(self.name, self.history, (self.signature, self.operations)):
            self._execute()
        note_updated(written, runtime)
        return meter.report(self.operations, self._graph)

    @at_edge
    @with_stack_room
    @without_dispatch_modes
    def abort(self) -> None:
        """Stops tracing, discards the graph, and restores everything to its state before the scope."""
        if not self._is_open:
            return
        if self._outer is not None:
            self._leave_inner()
            if self._outer.is_open:
                with torch._C.DisableTorchFunction():
                    self._undo_log.undo(discard=False)
            return
        self._merge_inner_logs()
        self._stop_tracing()
        try:
            self._restore_state()
        finally:
            self._interrupts.finish()

    def _restore_state(self) -> None:
        """Restores the state from before the step."""
        restore_state(self._runtime, self._undo_log, self._seeds_before)

    @at_edge
    def __enter__(self) -> StepScope:
        self._discarding = Discarding(self)
        self.open()
        return self

    @at_edge
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.history.ended(self.name, self.signature, self.close(), warns=self.config.on_recompile != "ignore")
        else:
            self._discarding.__exit__(kind, error, traceback)

    def translate(self, error: BaseException) -> XLAAdapterError | None:
        """The error to raise in place of one of the runtime's; `None` for an error of another kind."""
        if self._runtime.device.is_out_of_memory(error):
            return DeviceOutOfMemoryError.of_step(self.name, self._runtime.device.hardware())
        translated = self._breaks.translate(error, self.operations)
        if translated is None and self._runtime.tracing.is_lost_value(error):
            return ConcurrentStepError(
                f"the step {self.name!r} is undone: a tensor on the device has lost its value, as when another thread "
                "reads one or computes with one while a step is traced. Let other threads read copies that the thread "
                "of the training has made between two steps, or guard steps and reads by one lock."
            )
        return translated

    def _execute(self) -> None:
        """Executes the graph by a sync of the runtime."""
        analyses = self.history.analyses
        expected = analyses.expected(self.signature, self.operations)
        self._graph = expected or analyses.sync(self.signature, self.operations, self._undo_log, self._runtime)
        before = self._runtime.counters.compile_totals()[0]
        self._runtime.tracing.finish_step()
        if expected is not None and self._runtime.counters.compile_totals()[0] > before:
            self._graph = None

    def update_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Called when an optimizer is about to compute its update, after forward and backward."""

    def update_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """Called when an optimizer has computed its update."""

    # ---- tracing -------------------------------------------------------------------------------

    def _start_tracing(self) -> None:
        runtime, restores = self._runtime, self._restores
        self._before_tracing()
        keep_switches(runtime, restores)
        runtime.tracing.set_graph_name(self.name)
        runtime.tracing.set_eager(False)
        # Backward runs in this thread: there the dispatch mode sees it, Ctrl-C interrupts it, and it does not matter
        # whether a CPU backward ran before the runtime started (torch sizes its device queues only once).
        restores.enter_context(torch.autograd.set_multithreading_enabled(False))
        ModuleGuard(self).install(restores)
        UpdateGuard(self, runtime).install(restores)
        around = (extension.around_step(runtime) for extension in extensions())
        for context in (inference_mode_as_no_grad(), checkpointing_on_device(), as_in_one_graph(), *around):
            restores.enter_context(context)
        restores.enter_context(runtime.tracing.intercept(self._on_runtime_event))
        runtime.tracing.set_execution_allowed(not self.forbids_breaks)
        self._breaks.begin(self.undo_logs)
        self._seeds_before = (runtime.random.seed(), torch.get_rng_state())
        # The present seed is set too: if it is pending (drawn lazily since the last step), this graph would differ.
        runtime.random.set_seed(self._seeds_before[0] if self._seed is None else self._seed.value())
        self.start_recording(self._undo_log)

    def _updates_of_lists(self) -> AbstractContextManager[ListUpdates]:
        if not self._runtime.has_lazy_tensors:
            return nullcontext(ListUpdates())
        return updates_of_lists(self._runtime, self._record_write, self.on_torchs_update)

    def on_torchs_update(self) -> None:
        """Called when torch's own function is about to compute an update that `updates_of_lists` could not."""

    def _record_write(self, tensor: torch.Tensor) -> None:
        if self._mode is not None:
            self._mode.undo_log.record(tensor)

    def _before_tracing(self) -> None:
        """Executes what is pending: it is no part of the step's graph, and stays if the step is discarded."""
        if self._runtime.tracing.pending_count():
            self._runtime.tracing.flush()

    def _stop_tracing(self) -> None:
        self._is_open = False
        self._breaks.end(executed=self._executed)
        if open_step.step is self:
            open_step.step = None
        self.stop_recording()
        try:
            self._restores.close()
        finally:
            end_only_step(self)

    def _merge_inner_logs(self) -> None:
        if self._mode is not None:
            self._mode.undo_log.merge_up_to(self._undo_log)

    def _leave_inner(self) -> None:
        self._is_open = False
        assert self._outer is not None
        assert self._outer_undo_log is not None
        if self._outer._mode is not None:
            self._outer._mode.undo_log = self._outer_undo_log

    def undo_logs(self) -> list[UndoLog]:
        """The undo logs of all open steps, the innermost first."""
        return [self._undo_log] if self._mode is None else self._mode.undo_log.chain()

    def start_recording(self, undo_log: UndoLog) -> None:
        """Starts recording writes to tensors in an undo log, and reporting reads."""
        # Until the body ends: a capture notes which functions torch's namespaces hold.
        self._list_updates = self._lists.enter_context(self._updates_of_lists())
        told = (self._breaks.on_read, self._breaks.on_dynamic, self._breaks.on_refusal)
        self._mode = StepMode(undo_log, *told, self.operations, self._breaks.allowed_reads)
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    @at_edge
    def stop_recording(self) -> None:
        """Stops recording; `start_recording` starts it again."""
        self._lists.close()
        if self._mode is not None:
            self._mode.detach()
            self._mode = None

    @at_edge
    def pause_recording(self) -> None:
        """Stops recording until `resume_recording`."""
        if self._mode is not None:
            self._mode.detach()

    @at_edge
    def resume_recording(self) -> None:
        """Continues recording after `pause_recording`."""
        if self._mode is not None:
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    # ---- graph breaks ------------------------------------------------------------------------------

    def end_at_reads(self, end: Callable[[bool], bool]) -> None:
        """Lets the step end where a value is read, if it may.

        Args:
            end: closes the step if it may end; returns whether it is closed. Called with True where the read is an
                error.
        """

        def end_early(is_error: bool) -> bool:
            mode = self._mode
            has_ended = end(is_error)
            if mode is not None and not self._is_open:
                mode.pass_on()
            return has_ended

        self._breaks.end_early = end_early

    def meet_break(self, kind: BreakKind, what: str) -> None:
        """Reports a graph break that the caller is about to cause, and executes what is pending.

        Raises:
            GraphBreakError: the subclass for `kind`, under `on_graph_break="error"`.
        """
        self._breaks.meet(kind, what)

    def _on_runtime_event(self, event: RuntimeEvent, subject: object) -> bool:
        return not self.is_current or self._breaks.on_runtime_event(event, subject)

    def flush(self) -> None:
        """Executes all that is pending, so that the rest of the step need not compute it again."""
        self._breaks.flush()
