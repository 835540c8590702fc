"""`ModuleGuard`: hooks on the modules that run in a step."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from xla_adapters.lowerings import cumulative_average
from xla_adapters.tracing.guarded_step import GuardedStep


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

    def _after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if module in self._averaging:
            self._averaging.remove(module)
            module.momentum = None  # type: ignore[assignment]

    def _restore(self) -> None:
        for module in self._averaging:
            module.momentum = None  # type: ignore[assignment]
        self._averaging.clear()
