"""`ModuleGuard` and `UpdateGuard`: what a step does around the modules and the optimizers that run in it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from xla_adapters.errors import IdleOptimizerWarning
from xla_adapters.lowerings import cumulative_average
from xla_adapters.runtime import Runtime
from xla_adapters.tracing.operation_log import OperationLog
from xla_adapters.tracing.optimizers import (
    check_supported,
    eager_reason,
    is_stand_in,
    needs_no_recording,
    prepare_for_tracing,
    warn_eager,
)
from xla_adapters.tracing.step_profile import OPTIMIZER, SPANS
from xla_adapters.tracing.undo_log import UndoLog
from xla_adapters.utils.location import current_location, warn_at
from xla_adapters.utils.torch_modes import as_if_compiling


class GuardedStep(Protocol):
    """A step that is being traced; `StepScope` is one."""

    @property
    def is_current(self) -> bool:
        """Whether this is the current thread's outermost step."""

    @property
    def is_recording(self) -> bool:
        """Whether writes to tensors are recorded, to be undone after an error."""

    @property
    def forbids_breaks(self) -> bool:
        """Whether a graph break is an error (`on_graph_break="error"`)."""

    @property
    def operations(self) -> OperationLog:
        """What the step has called so far."""

    def undo_logs(self) -> list[UndoLog]:
        """The undo logs of all open steps, the innermost first."""

    def update_begins(self, optimizer: Optimizer) -> None:
        """Called before `optimizer.step()`."""

    def update_ended(self, optimizer: Optimizer) -> None:
        """Called after `optimizer.step()`."""

    def pause_recording(self) -> None:
        """Stops recording until `resume_recording`."""

    def resume_recording(self) -> None:
        """Continues recording after `pause_recording`."""

    def stop_recording(self) -> None:
        """Stops recording; `start_recording` starts it again."""

    def start_recording(self, undo_log: UndoLog) -> None:
        """Starts recording into this undo log."""

    def flush(self) -> None:
        """Executes all that is pending, before the end of the step."""


class ModuleGuard:
    """Records the buffers of modules that run in a step, and lets batch norms average without a read.

    Args:
        step: in which modules run.
    """

    def __init__(self, step: GuardedStep) -> None:
        self._step = step
        self._averaging: set[torch.nn.Module] = set()

    def install(self, restores: ExitStack) -> None:
        """Registers hooks on all modules; closing `restores` removes them."""
        restores.callback(self._restore)
        restores.callback(register_module_forward_pre_hook(self._before_forward).remove)
        restores.callback(register_module_forward_hook(self._after_forward).remove)
        restores.callback(register_module_buffer_registration_hook(self._before_buffer).remove)

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        if not self._step.is_current or not self._step.is_recording:
            return
        # After an error in its last call no hook ran; a recomputation with early stop ends by one.
        self._after_forward(module, args, None)
        self._step.undo_logs()[0].record_module(module)
        self._step.operations.module(module)
        momentum = cumulative_average(module)
        if momentum is not None:
            self._averaging.add(module)
            module.momentum = momentum

    def _before_buffer(self, module: torch.nn.Module, name: str, value: Any) -> None:
        """A module gets another buffer, also one that the step does not call (a LightningModule)."""
        if self._step.is_current and self._step.is_recording:
            self._step.undo_logs()[0].record_module(module)

    def _after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if module in self._averaging:
            self._averaging.remove(module)
            module.momentum = None  # type: ignore[assignment]

    def _restore(self) -> None:
        for module in self._averaging:
            module.momentum = None  # type: ignore[assignment]
        self._averaging.clear()


# Told once each.
_idle: WeakSet[Optimizer] = WeakSet()


class UpdateGuard:
    """Makes the first update the same graph as all later ones, and runs optimizers eagerly that cannot be traced.

    Args:
        step: in which optimizers step.
        runtime: the runtime.
    """

    def __init__(self, step: GuardedStep, runtime: Runtime) -> None:
        self._step = step
        self._runtime = runtime
        self._during_update = ExitStack()
        self._eager_undo_logs: list[UndoLog] = []
        self._updating: Optimizer | None = None
        self._nested = 0

    def install(self, restores: ExitStack) -> None:
        """Registers hooks on all optimizers; closing `restores` removes them."""
        restores.callback(register_optimizer_step_pre_hook(self._before).remove)
        restores.callback(register_optimizer_step_post_hook(self._after).remove)
        restores.callback(self._during_update.close)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if not self._step.is_current or is_stand_in(optimizer):
            return None
        if optimizer is self._updating:
            # `super().step()` of a subclass.
            self._nested += 1
            return None
        check_supported(type(optimizer))
        self._updating, self._nested = optimizer, 0
        reason = eager_reason(optimizer)
        with torch._C.DisableTorchFunction():
            # In the innermost log only: for an outer step this is not the state at its beginning.
            self._step.undo_logs()[0].record_optimizer(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if reason is not None or closure is None:
            self._step.operations.update(optimizer)
        if reason is not None:
            self._run_eagerly(optimizer, reason, with_closure=closure is not None)
            return None
        if closure is None:
            self._enter(optimizer)
            return None
        closure = self._before_update(optimizer, closure)
        return (
            (args, {**kwargs, "closure": closure}) if "closure" in kwargs else ((args[0], closure, *args[2:]), kwargs)
        )

    def _before_update(self, optimizer: Optimizer, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a closure, which runs forward and backward, so that the update is prepared after it."""
        is_noted = False

        def evaluated(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_noted
            # Some optimizers evaluate it again in the middle of their update.
            self._during_update.close()
            result = closure(*args, **kwargs)
            if not is_noted:
                # Only now the gradients of this update are there.
                self._step.operations.update(optimizer)
                is_noted = True
            self._enter(optimizer)
            return result

        return evaluated

    def _enter(self, optimizer: Optimizer) -> None:
        SPANS.begin(OPTIMIZER)
        if any(leaf.grad is not None for leaf, _ in self._step.undo_logs()[0].leaves()):
            _warn_if_idle(optimizer)
        # Under `torch.compile` optimizers compute in another order than in eager mode.
        self._during_update.enter_context(as_if_compiling(False))
        with torch._C.DisableTorchFunction():
            prepare_for_tracing(optimizer, self._runtime)
            self._step.undo_logs()[0].record_optimizer_state(optimizer)
        self._step.update_begins(optimizer)
        # A learning rate of exactly 0 or 1 would be a constant of the graph, and cost a compile.
        tracing = self._runtime.tracing
        self._during_update.callback(tracing.set_constant_scalars, tracing.constant_scalars())
        tracing.set_constant_scalars(False)
        if self._step.forbids_breaks and needs_no_recording(optimizer):
            self._step.pause_recording()
            self._during_update.callback(self._step.resume_recording)

    def _run_eagerly(self, optimizer: Optimizer, reason: str, *, with_closure: bool) -> None:
        warn_eager(optimizer, reason, with_closure=with_closure)
        self._during_update.enter_context(as_if_compiling(False))
        self._eager_undo_logs = self._step.undo_logs()
        self._step.stop_recording()
        self._step.flush()
        self._runtime.tracing.set_execution_allowed(True)
        self._runtime.tracing.set_eager(True)
        self._during_update.callback(self._runtime.tracing.set_eager, False)
        self._during_update.callback(self._runtime.tracing.set_execution_allowed, not self._step.forbids_breaks)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._step.is_current or is_stand_in(optimizer):
            return
        if optimizer is self._updating and self._nested:
            self._nested -= 1
            return
        self._updating = None
        self._during_update.close()
        SPANS.end(OPTIMIZER)
        self._step.update_ended(optimizer)
        undo_logs, self._eager_undo_logs = self._eager_undo_logs, []
        if undo_logs:
            # An eager update cannot be undone.
            for undo_log in undo_logs:
                undo_log.clear()
            self._step.start_recording(undo_logs[0])


def _warn_if_idle(optimizer: Optimizer) -> None:
    """Warns, once per optimizer, if it is about to update nothing, though others have gradients."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if parameters and all(parameter.grad is None for parameter in parameters) and optimizer not in _idle:
        _idle.add(optimizer)
        name, place = type(optimizer).__name__, current_location()
        where = "" if place is None else f" ({place.called_from or place})"
        warn_at(
            place,
            f"{name}.step() updates nothing: none of its {len(parameters)} parameters has a gradient{where}. If the "
            f"model was moved (model.to(...)) after the optimizer was made, its parameters are others now: make the "
            f"{name} after the last move",
            IdleOptimizerWarning,
        )
