"""`PlaceholderScope`: a step that is traced with placeholders, and executed once at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from xla_adapters.errors import UnsupportedOptionError
from xla_adapters.tracing.activation_checkpointing import checkpointing_on_device
from xla_adapters.tracing.compile_progress import compile_progress
from xla_adapters.tracing.graph_history import check_graph
from xla_adapters.tracing.interrupts import at_edge
from xla_adapters.tracing.placeholders.mode import PlaceholderMode
from xla_adapters.tracing.placeholders.numbers import Lifting
from xla_adapters.tracing.placeholders.program import Program
from xla_adapters.tracing.placeholders.trace import ProgramInput, Trace
from xla_adapters.tracing.scope_report import NOTHING_COMPILED, CompileMeter, ScopeReport
from xla_adapters.tracing.step_hooks import ModuleGuard, UpdateGuard
from xla_adapters.tracing.step_scope import StepScope
from xla_adapters.tracing.undo_log import DiscardedTensor, UndoLog
from xla_adapters.utils.torch_modes import as_in_one_graph, inference_mode_as_no_grad, results_of_transforms


class PlaceholderScope(StepScope):
    """One traced call of a step on a runtime without lazy tensors; as `StepScope` otherwise.

    Args:
        **options: as for `StepScope`.

    Raises:
        UnsupportedOptionError: `on_graph_break` is not `"error"`: what a step reads has no value before its end.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.config.on_graph_break != "error":
            raise UnsupportedOptionError(
                f"on_graph_break={self.config.on_graph_break!r}: with {self._runtime.name} nothing of a step can be "
                "executed before its end; leave it out, and read after the step"
            )
        self._trace: Trace | None = None
        self._unmade: list[torch.Tensor] = []
        self._lifting: Lifting | None = None
        self._singles: list[tuple[dict[str, Any], Any]] = []
        self._stream_before: torch.Tensor | None = None
        self._host_before: torch.Tensor | None = None
        # What the other ranks were told of the program; empty if it does without them.
        self.told_ranks = ""

    @property
    def inputs(self) -> Sequence[ProgramInput]:
        """The tensors that have placeholders in the present trace, in the order of the program's arguments."""
        return [] if self._trace is None else self._trace.inputs

    # ---- tracing -------------------------------------------------------------------------------

    def _start_tracing(self) -> None:
        runtime, restores = self._runtime, self._restores
        restores.callback(runtime.tracing.set_graph_name, runtime.tracing.graph_name())
        runtime.tracing.set_graph_name(self.name)
        # Backward runs in this thread, where the mode sees it.
        restores.enter_context(torch.autograd.set_multithreading_enabled(False))
        ModuleGuard(self).install(restores)
        restores.callback(register_optimizer_step_pre_hook(_refuse_fused).remove)
        UpdateGuard(self, runtime).install(restores)
        for context in (inference_mode_as_no_grad(), checkpointing_on_device(), as_in_one_graph()):
            restores.enter_context(context)
        restores.enter_context(runtime.tracing.intercept(self._on_runtime_event))
        restores.enter_context(results_of_transforms(self._note_result))
        self._breaks.begin(self.undo_logs)
        self._stream_before, self._host_before = runtime.placeholders.random_state(), torch.get_rng_state()
        if self._seed is not None:
            runtime.random.set_seed(self._seed.value())
        # Cached casts of weights have no placeholders.
        torch.clear_autocast_cache()
        self.start_recording(self._undo_log)

    def start_recording(self, undo_log: UndoLog) -> None:
        """See `StepScope`."""
        if self._trace is None:
            self._trace = Trace(self._runtime, self.undo_logs)
            self._trace.begin()
        breaks = self._breaks
        told = (breaks.on_read, breaks.on_dynamic, breaks.on_refusal)
        self._mode = PlaceholderMode(self._trace, undo_log, *told, self.operations, breaks.allowed_reads)
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _note_result(self, result: Any) -> None:
        if self._trace is not None and self._runtime.device.owns(result):
            with torch._C.DisableTorchFunction():
                self._trace.traced.note(result)

    def pause_recording(self) -> None:
        """Goes on recording: each tensor needs its placeholder, those of an optimizer, too."""

    def resume_recording(self) -> None:
        """See `pause_recording`."""

    def update_begins(self, optimizer: Optimizer) -> None:
        """Makes the numbers of the update arguments of the program; it runs parameter by parameter."""
        for group in optimizer.param_groups:
            if "foreach" in group:
                self._singles.append((group, group["foreach"]))
                group["foreach"] = False
        assert self._trace is not None
        assert isinstance(self._mode, PlaceholderMode)
        self._lifting = self._mode.lifting = Lifting(self._trace.numbers, self._roles(optimizer))

    def _roles(self, optimizer: Optimizer) -> list[tuple[int, float]] | None:
        """For each number of the update what it is and its value; None if that is not known."""
        return None

    def update_ended(self, optimizer: Optimizer) -> None:
        """The optimizer has computed its update."""
        self._restore_groups()
        if isinstance(self._mode, PlaceholderMode):
            self._mode.lifting = None

    def _restore_groups(self) -> None:
        for group, foreach in self._singles:
            group["foreach"] = foreach
        self._singles.clear()

    # ---- the end -------------------------------------------------------------------------------

    @at_edge
    def _finish_graph(self) -> ScopeReport:
        self._breaks.check_end(self.operations)
        if self.config.free_grads is True:
            self._undo_log.free_grads()
        self.stop_recording()
        return self._run_trace()

    def flush(self) -> None:
        """Executes what was traced so far; only an optimizer that runs operation by operation needs that."""
        self._run_trace()
        for log in self.undo_logs():
            log.clear()

    def _run_trace(self) -> ScopeReport:
        """Compiles the trace, unless its program is known, and runs it."""
        trace = self._trace
        if trace is None:
            return NOTHING_COMPILED
        meter = CompileMeter(self._runtime)
        call = self.signature, self.operations
        with torch.no_grad(), torch._C.DisableTorchFunction():
            program = trace.program(self._undo_log.leaves())
            if not program.results:
                self._end_trace()
                trace.give_values(program, [])
                self._ran(trace, program)
                return NOTHING_COMPILED
            check_graph(self.name, self.config, call, self.history, program.key)
            if self._runtime.device.ranks is not None and program.has_collectives:
                self.told_ranks = f"the step {self.name!r} ({self.signature})"
            self._before_run(trace, program)
            with compile_progress(self.name, self.history, call):
                run = program.compiled(self.name)
            self._end_trace()
            if self._runtime.device.ranks is not None and self.told_ranks:
                self._runtime.device.ranks.launches(program.key, trace.numbers.values, self.told_ranks)
            results = run(trace.values(program))
            self._breaks.executing = True
            trace.give_values(program, results)
            self._ran(trace, program)
        return meter.report(self.operations)

    def _before_run(self, trace: Trace, program: Program) -> None:
        """Called when the call is traced and not executed yet."""

    def _ran(self, trace: Trace, program: Program) -> None:
        """Called when the call was executed."""

    def _end_trace(self) -> None:
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.end()

    def _stop_tracing(self) -> None:
        self._restore_groups()
        made = [] if self._trace is None else self._trace.traced.alive()
        inputs = () if self._trace is None else self._trace.inputs
        kept = {id(tensor) for item in inputs for tensor in (item.tensor, *item.aliases)}
        self._unmade = [tensor for tensor in made if id(tensor) not in kept]
        try:
            super()._stop_tracing()
        finally:
            self._end_trace()

    def _restore_state(self) -> None:
        with torch._C.DisableTorchFunction():
            self._undo_log.undo(discard=False)
            for tensor in self._unmade:
                if type(tensor) is torch.Tensor:
                    tensor.__class__ = DiscardedTensor
            self._unmade = []
            if self._stream_before is not None and self._host_before is not None:
                self._runtime.placeholders.set_random_state(self._stream_before)
                torch.set_rng_state(self._host_before)
        torch.clear_autocast_cache()


def _refuse_fused(optimizer: Optimizer, args: object, kwargs: object) -> None:
    if any(group.get("fused") for group in optimizer.param_groups):
        raise UnsupportedOptionError(
            f"{type(optimizer).__name__}(fused=True): torch_tpu has no such kernel, and the step's program fuses the "
            "update anyway; leave it out"
        )
