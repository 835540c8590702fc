"""`StepScope`: the code inside it is traced; leaving it executes the one graph, once.

Implements what RFC pytorch/xla#6751 asks of a step: nothing executes between its edges, everything
has executed behind them, and whoever leaves early leaves nothing behind.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

import torch

from xla_adapters.backend import Backend, SeamEvent, get_backend
from xla_adapters.breaks import BreakPolicy, classify_read, profiler_name
from xla_adapters.claim import claim_process, release_process
from xla_adapters.config import XLAConfig
from xla_adapters.discarding import Discarding
from xla_adapters.errors import BreakKind, ConcurrentStepError, DeviceOutOfMemoryError, XLAAdapterError
from xla_adapters.graph_limit import check_pending_graph, graphs_of
from xla_adapters.interrupts import InterruptGuard, at_edge
from xla_adapters.location import location_of
from xla_adapters.modules import ModuleGuard
from xla_adapters.packed_state import unpack_all
from xla_adapters.rng import StepSeed
from xla_adapters.rollback import StepJournal
from xla_adapters.sums import sums_as_products
from xla_adapters.updates import UpdateGuard
from xla_adapters.waiting_steps import settle
from xla_adapters.watch import StepWatch


class _Current(threading.local):
    scope: StepScope | None = None


_current = _Current()


def current_scope() -> StepScope | None:
    """The step scope this thread is in, the outermost one; `None` outside."""
    return _current.scope


def in_step() -> bool:
    """Whether this thread is inside a step that is being traced."""
    return _current.scope is not None


@dataclass(frozen=True, kw_only=True)
class ScopeReport:
    """What leaving a scope cost: graphs newly compiled, and the seconds that took."""

    compiles: int
    compile_seconds: float


class StepScope:
    """One pass through a step. Use `xla_adapters.step()`; adapters open and close it themselves.

    Args:
        name: of the step, for messages and graph dumps.
        config: the options; `XLAConfig()` if not given.
        seed: the random stream of this pass; the device's own stream goes on if not given.
        hint: where the host framework offers a place for reads, for messages.
        graphs: the graphs counted against `max_graphs`; by default those of all steps of this name.
    """

    def __init__(
        self,
        *,
        name: str = "step",
        config: XLAConfig | None = None,
        seed: StepSeed | None = None,
        hint: str = "",
        graphs: set[str] | None = None,
    ) -> None:
        self.name = name
        self._graphs = graphs
        self.config = config if config is not None else XLAConfig()
        self._seed = seed
        self._policy = BreakPolicy(self.config.on_graph_break, name, hint)
        self._backend: Backend = get_backend()
        self._outer: StepScope | None = None
        self._outer_journal: StepJournal | None = None
        self._journal = StepJournal(self._backend)
        self._watch: StepWatch | None = None
        self._interrupts = InterruptGuard()
        self._restores = ExitStack()
        self._profiler_scopes: list[object] = []
        self._totals_before = (0, 0.0)
        self._seeds_before: tuple[int, torch.Tensor] | None = None
        self._break_met = False
        self._is_open = False
        self._executing = self._executed = False

    @property
    def executed(self) -> bool:
        """Whether the graph was handed to the device, if with an error afterwards (Ctrl-C while it compiles)."""
        return self._executed

    @property
    def is_open(self) -> bool:
        """Whether the scope has been opened and neither closed nor aborted."""
        return self._is_open

    @property
    def is_current(self) -> bool:
        """Whether this thread is in this scope (the outermost of nested ones)."""
        return _current.scope is self

    @property
    def is_watching(self) -> bool:
        """Whether what happens is recorded."""
        return self._watch is not None

    @property
    def forbids_breaks(self) -> bool:
        """Whether a graph break is an error."""
        return self.config.on_graph_break == "error"

    # ---- edges ---------------------------------------------------------------------------------

    @at_edge
    def open(self) -> None:
        """Starts tracing. Inside another scope it only marks a point to fall back to.

        Raises:
            ConcurrentStepError: another thread is inside a step, or this scope is open already.
        """
        if self._is_open:
            raise ConcurrentStepError(f"the step {self.name!r} is open already")
        outer = _current.scope
        if outer is not None:
            self._is_open = True
            self._outer = outer
            assert outer._watch is not None
            self._outer_journal = outer._watch.journal
            self._journal = outer._watch.journal = StepJournal(self._backend, enclosing=self._outer_journal)
            return
        settle("a step is traced")
        unpack_all()
        # Whoever is interrupted below would leave the process claimed.
        self._interrupts.install()
        try:
            claim_process(self)
            self._is_open = True
            self._start_tracing()
        except BaseException:
            if self._is_open:
                self._stop_tracing()
            self._interrupts.finish()
            raise
        _current.scope = self

    @at_edge
    def close(self) -> ScopeReport:
        """Stops tracing and executes the graph.

        An error after the graph was handed to the device (Ctrl-C while it compiles) leaves the step
        done; any other discards it.

        Raises:
            ProfilerScopeError: a profiler scope opened inside is still open; the step is discarded.
            GraphLimitError: the graph would be one more than `max_graphs`; the step is discarded.
        """
        if not self._is_open:
            return ScopeReport(compiles=0, compile_seconds=0.0)
        if self._outer is not None:
            if not self._outer.is_open:
                self._is_open = False
                raise ConcurrentStepError(
                    f"the step {self.name!r} lies inside {self._outer.name!r}, which has ended before it; steps must "
                    "be left in the reverse order of their entry (a generator that is suspended inside a step?)"
                )
            self._leave_inner()
            assert self._outer_journal is not None
            self._journal.merge_into(self._outer_journal)
            # What it holds would be an output of the enclosing step's graph.
            self._journal.clear()
            return ScopeReport(compiles=0, compile_seconds=0.0)
        self._merge_inner_journals()
        try:
            self._refuse_open_profiler_scopes()
            self._report_hidden_executions()
            if self.config.free_grads is True:
                self._journal.free_grads()
            self.drop_watch()
            self._journal.apply_writes()
            self._journal.restate_dtypes()
            self._journal.detach_new_grads()
            self._check_graph_limit()
            self._backend.set_execution_allowed(True)
            self._executing = True
            before = self._backend.compile_totals()
            self._execute()
            after = self._backend.compile_totals()
        except BaseException as error:
            if self._executing and not self._backend.pending_count():
                # The graph has been executed, and the old values' buffers are gone: nothing to go back to.
                self._executed = True
                self._journal.clear()
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
        self._journal.retire()
        self._interrupts.finish()
        return ScopeReport(compiles=after[0] - before[0], compile_seconds=after[1] - before[1])

    @at_edge
    def abort(self) -> None:
        """Stops tracing, forgets the graph, and puts everything back as it was before the scope."""
        if not self._is_open:
            return
        if self._outer is not None:
            was_traced = self._outer.is_open
            self._leave_inner()
            if was_traced:
                with torch._C.DisableTorchFunction():
                    self._journal.undo(discard=False)
            return
        self._merge_inner_journals()
        self._stop_tracing()
        try:
            eager = self._backend.eager()
            # Looking at a tensor may bring its views up to date: an operation, to be discarded with the rest.
            self._backend.set_eager(False)
            try:
                self._journal.undo(discard=True)
            finally:
                self._backend.set_eager(eager)
            if self._seeds_before is not None:
                # The device's too: left as it is, it would be a value of the discarded graph.
                self._backend.set_seed(self._seeds_before[0])
                torch.set_rng_state(self._seeds_before[1])
            # Weights cast in it are values of the discarded graph as well.
            torch.clear_autocast_cache()
        finally:
            self._interrupts.finish()

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
            self.close()
        else:
            self._discarding.__exit__(kind, error, traceback)

    def translate(self, error: BaseException) -> XLAAdapterError | None:
        """What an error of the backend means here, or `None` if it is something else."""
        if self._backend.is_out_of_memory(error):
            return DeviceOutOfMemoryError.of_step(self.name, self._backend.hardware())
        if not self._backend.is_forbidden_execution(error):
            return None
        location = location_of(error.__traceback__)
        return self._policy.error(
            BreakKind.HIDDEN_EXECUTION,
            "an operation whose result depends on values (nonzero, a boolean index, unique, ...)",
            location,
            self._backend.pending_count(),
        )

    # ---- for executions that build on this one -------------------------------------------------
    def _execute(self) -> None:
        self._backend.finish_step()

    def update_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to compute its update; forward and backward are behind it."""

    def update_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has computed its update."""

    # ---- tracing -------------------------------------------------------------------------------

    def _start_tracing(self) -> None:
        backend = self._backend
        backend.initialize()
        if backend.pending_count():
            # Work from before the step is not part of its graph, and must survive a discarded step.
            backend.flush()
        restores = self._restores
        restores.callback(backend.set_graph_name, backend.graph_name())
        restores.callback(backend.set_execution_allowed, backend.execution_allowed())
        restores.callback(backend.set_eager, backend.eager())
        backend.set_graph_name(self.name)
        backend.set_eager(False)
        # Backward in this thread: seen by the watch, open to Ctrl-C, and independent of whether a CPU
        # backward ran before the runtime started (torch sizes its device queues only once).
        restores.enter_context(torch.autograd.set_multithreading_enabled(False))
        ModuleGuard(self).install(restores)
        UpdateGuard(self, backend).install(restores)
        restores.enter_context(sums_as_products(backend))
        restores.enter_context(backend.intercept(self._on_seam_event))
        backend.set_execution_allowed(not self.forbids_breaks)
        self._totals_before = backend.compile_totals()
        self._seeds_before = (backend.seed(), torch.get_rng_state())
        # Its present state too: what was drawn lazily since the last step would make this one another graph.
        backend.set_seed(self._seeds_before[0] if self._seed is None else self._seed.value())
        self.watch_into(self._journal)

    def _stop_tracing(self) -> None:
        self._is_open = self._executing = False
        if _current.scope is self:
            _current.scope = None
        self.drop_watch()
        try:
            self._restores.close()
        finally:
            release_process(self)

    def _merge_inner_journals(self) -> None:
        if self._watch is not None:
            self._watch.journal.merge_up_to(self._journal)

    def _leave_inner(self) -> None:
        self._is_open = False
        assert self._outer is not None
        assert self._outer_journal is not None
        if self._outer._watch is not None:
            self._outer._watch.journal = self._outer_journal

    def watch_into(self, journal: StepJournal) -> None:
        """Watches from here on, and records in this journal."""
        self._watch = StepWatch(journal, self._on_read, self._on_dynamic)
        self._watch.__enter__()  # type: ignore[no-untyped-call]

    @at_edge
    def drop_watch(self) -> None:
        """Ends the watch; what is written from here on is not recorded."""
        if self._watch is not None:
            self._watch.detach()
            self._watch = None

    @at_edge
    def pause_watch(self) -> None:
        """Looks away until `resume_watch`."""
        if self._watch is not None:
            self._watch.detach()

    @at_edge
    def resume_watch(self) -> None:
        """Looks again."""
        if self._watch is not None:
            self._watch.__enter__()  # type: ignore[no-untyped-call]

    # ---- graph breaks ----------------------------------------------------------------------------

    def _on_read(self, what: str, tensor: torch.Tensor) -> None:
        pending = self._backend.is_pending(tensor)
        self._policy.meet(classify_read(), what, self._backend, ready=not pending)
        # Reads made of several operations execute more than what is flushed here; that is reported already.
        self._break_met = True
        if pending:
            self.flush()

    def _on_dynamic(self, what: str, tensor: torch.Tensor) -> None:
        pending = self._backend.is_pending(tensor)
        self._policy.meet(BreakKind.HIDDEN_EXECUTION, what, self._backend, ready=not pending)
        self._break_met = True
        if pending:
            self.flush()

    def meet_break(self, kind: BreakKind, what: str) -> None:
        """Treats something the caller is about to do as `on_graph_break` says: raises, or executes what is pending.

        Raises:
            GraphBreakError: the subclass for `kind`, under `on_graph_break="error"`.
        """
        self._policy.meet(kind, what, self._backend)
        self._break_met = True
        self.flush()

    def _on_seam_event(self, event: SeamEvent, subject: object) -> None:
        if _current.scope is not self or self._executing:
            return
        if event is SeamEvent.PROFILER_ENTER:
            self._profiler_scopes.append(subject)
        elif event is SeamEvent.PROFILER_EXIT:
            if subject in self._profiler_scopes:
                self._profiler_scopes.remove(subject)
            else:
                what = f"{profiler_name(subject)} was opened before the step and is closed inside"
                self._policy.meet(BreakKind.PROFILER_SCOPE, what, self._backend)
        else:
            kind = classify_read()
            kind = BreakKind.DEVICE_SYNC if kind is BreakKind.TENSOR_READ else kind
            what = "wait for the device" if event is SeamEvent.WAIT else "sync (mark_step)"
            if kind is BreakKind.PROFILER_SCOPE:
                what = "a profiler scope that syncs the device when it closes (StepTrace)"
            self._policy.meet(kind, what, self._backend)
            if event is SeamEvent.SYNC:
                self.flush()

    def flush(self) -> None:
        """Executes what is pending, once and whole, so that the rest need not compute it again."""
        for journal in self.journals():
            journal.forget_executed()
        before = self._backend.compile_totals()
        allowed = self._backend.execution_allowed()
        self._backend.set_execution_allowed(True)
        self._executing = True
        try:
            self._backend.flush()
        finally:
            self._executing = False
            self._backend.set_execution_allowed(allowed)
        compiled = self._backend.compile_totals()[0] - before[0]
        self._totals_before = (self._totals_before[0] + compiled, self._totals_before[1])

    def journals(self) -> list[StepJournal]:
        """The journals of all open steps, the innermost first."""
        return [self._journal] if self._watch is None else self._watch.journal.chain()

    def _report_hidden_executions(self) -> None:
        if self._break_met:
            return
        if self.config.on_graph_break == "warn" and self._backend.compile_totals()[0] > self._totals_before[0]:
            what = "an operation read a value inside C++, where its line cannot be told"
            self._policy.warn(BreakKind.HIDDEN_EXECUTION, what, None, self._backend.pending_count())

    def _check_graph_limit(self) -> None:
        if self.config.max_graphs is not None:
            graphs = graphs_of(self.name) if self._graphs is None else self._graphs
            check_pending_graph(self.name, self.config.max_graphs, graphs, self._journal, self._backend)

    def _refuse_open_profiler_scopes(self) -> None:
        if self._profiler_scopes:
            what = f"{profiler_name(self._profiler_scopes[-1])} was opened inside and is still open"
            self._policy.meet(BreakKind.PROFILER_SCOPE, what, self._backend)
