"""`ModuleGuard`: what a step must know of the modules that run in it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from xla_adapters.lowerings import cumulative_average

if TYPE_CHECKING:
    from xla_adapters.step_scope import StepScope


class ModuleGuard:
    """Journals the buffers of modules that run in a step, and averages batch norms without a read."""

    def __init__(self, scope: StepScope) -> None:
        self._scope = scope
        self._averaging: set[torch.nn.Module] = set()

    def install(self, restores: ExitStack) -> None:
        """Watches the modules of this process until `restores` is closed."""
        restores.callback(self._restore)
        restores.callback(register_module_forward_pre_hook(self._before_forward).remove)
        restores.callback(register_module_forward_hook(self._after_forward, always_call=True).remove)

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        if not self._scope.is_current or not self._scope.is_watching:
            return
        self._scope.journals()[0].record_module(module)
        momentum = cumulative_average(module)
        if momentum is not None:
            self._averaging.add(module)
            module.momentum = momentum

    def _after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if module in self._averaging:
            self._averaging.remove(module)
            module.momentum = None  # type: ignore[assignment]

    def _restore(self) -> None:
        for module in self._averaging:
            module.momentum = None  # type: ignore[assignment]
        self._averaging.clear()
