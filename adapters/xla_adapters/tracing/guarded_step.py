"""`GuardedStep`: the interface of a step scope that `ModuleGuard` and `UpdateGuard` use."""

from __future__ import annotations

from typing import Protocol

from torch.optim import Optimizer

from xla_adapters.tracing.operation_log import OperationLog
from xla_adapters.tracing.undo_log import UndoLog


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
