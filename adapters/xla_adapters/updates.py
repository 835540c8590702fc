"""`UpdateGuard`: what happens around `optimizer.step()` inside a step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from xla_adapters.backend import Backend
from xla_adapters.optimizer_packages import check_supported
from xla_adapters.optimizers import eager_reason, is_stand_in, needs_no_watch, prepare_for_tracing, warn_eager
from xla_adapters.rollback import StepJournal

if TYPE_CHECKING:
    from xla_adapters.step_scope import StepScope


class UpdateGuard:
    """Makes the first update the same graph as all later ones, and lets what cannot be traced run eagerly.

    Args:
        step: whose updates are guarded.
        backend: the seam.
    """

    def __init__(self, step: StepScope, backend: Backend) -> None:
        self._step = step
        self._backend = backend
        self._during_update = ExitStack()
        self._eager_journals: list[StepJournal] = []
        self._updating: Optimizer | None = None
        self._nested = 0

    def install(self, restores: ExitStack) -> None:
        """Watches all optimizers until `restores` is closed."""
        restores.callback(register_optimizer_step_pre_hook(self._before).remove)
        restores.callback(register_optimizer_step_post_hook(self._after).remove)
        restores.callback(self._during_update.close)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if not self._step.is_current or is_stand_in(optimizer):
            return None
        if optimizer is self._updating:
            # `super().step()` in a class of its own.
            self._nested += 1
            return None
        check_supported(type(optimizer))
        self._updating, self._nested = optimizer, 0
        reason = eager_reason(optimizer)
        with torch._C.DisableTorchFunction():
            # In the innermost alone: what an outer one recorded now would be the state in mid-step.
            self._step.journals()[0].record_optimizer(optimizer)
        if reason is not None:
            self._run_eagerly(optimizer, reason)
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._enter(optimizer)
            return None
        closure = self._before_update(optimizer, closure)
        return (
            (args, {**kwargs, "closure": closure}) if "closure" in kwargs else ((args[0], closure, *args[2:]), kwargs)
        )

    def _before_update(self, optimizer: Optimizer, closure: Callable[..., Any]) -> Callable[..., Any]:
        """The closure holds forward and backward: watched as usual, and followed by the update."""

        def evaluated(*args: Any, **kwargs: Any) -> Any:
            # Some optimizers evaluate it again in the middle of their update.
            self._during_update.close()
            result = closure(*args, **kwargs)
            self._enter(optimizer)
            return result

        return evaluated

    def _enter(self, optimizer: Optimizer) -> None:
        with torch._C.DisableTorchFunction():
            prepare_for_tracing(optimizer, self._backend)
            self._step.journals()[0].record_optimizer_state(optimizer)
        self._step.update_begins(optimizer)
        # A learning rate of exactly 0 or 1 would be a constant of the graph, and cost a compile.
        self._during_update.enter_context(self._backend.scalars_as_inputs())
        if self._step.forbids_breaks and needs_no_watch(optimizer):
            self._step.pause_watch()
            self._during_update.callback(self._step.resume_watch)

    def _run_eagerly(self, optimizer: Optimizer, reason: str) -> None:
        warn_eager(optimizer, reason)
        self._eager_journals = self._step.journals()
        self._step.drop_watch()
        self._step.flush()
        self._backend.set_execution_allowed(True)
        self._backend.set_eager(True)
        self._during_update.callback(self._backend.set_eager, False)
        self._during_update.callback(self._backend.set_execution_allowed, not self._step.forbids_breaks)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._step.is_current or is_stand_in(optimizer):
            return
        if optimizer is self._updating and self._nested:
            self._nested -= 1
            return
        self._updating = None
        self._during_update.close()
        self._step.update_ended(optimizer)
        journals, self._eager_journals = self._eager_journals, []
        if journals:
            # What ran eagerly is done; there is nothing older to go back to.
            for journal in journals:
                journal.clear()
            self._step.watch_into(journals[0])
