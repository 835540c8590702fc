"""What happens at a graph break: the error, or the one warning per line."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass

from xla_adapters.backend import Backend
from xla_adapters.config import OnGraphBreak
from xla_adapters.errors import GRAPH_BREAK_ERRORS, BreakKind, GraphBreakError
from xla_adapters.location import Location, current_location, stack_frames

_SAVING_FILES = (
    "torch/serialization.py",
    "safetensors/",
    "torch/distributed/checkpoint/",
    "torch_xla/utils/serialization",
)
_SAVING_NAMES = frozenset(
    {"save", "save_file", "save_model", "save_pretrained", "save_checkpoint", "_save_checkpoint", "save_state"}
)
_COLLECTIVE_NAMES = frozenset(
    {"mesh_reduce", "rendezvous", "gather", "gather_object", "gather_for_metrics", "all_gather_object", "reduce"}
)
_COLLECTIVE_FILES = ("torch_xla/core/", "accelerate/", "torch/distributed/", "lightning/")
# StepTrace syncs when it closes.
_PROFILER_FILE = "torch_xla/debug/profiler.py"

_COSTS = {
    BreakKind.TENSOR_READ: "the value is not computed yet: the {pending} traced so far would be compiled and executed "
    "here, the rest of the step becomes a second graph, and the device stands still until the host has the value",
    BreakKind.CHECKPOINT_SAVE: "the {pending} traced so far would be compiled and executed here, as a graph of their "
    "own, and the file would hold the state of a step that is half done",
    BreakKind.DEVICE_SYNC: "the {pending} traced so far would be compiled and executed here, and the rest of the step "
    "becomes a second graph: two compiles and two executions instead of one",
    BreakKind.COLLECTIVE_READ: "the {pending} traced so far would be compiled and executed here on every replica, "
    "and all of them wait for the slowest",
    BreakKind.PROFILER_SCOPE: "the step executes while the scope is half open, so its time is booked on the wrong "
    "scope, or torch_xla fails with 'Expecting scope to be empty'",
    BreakKind.HIDDEN_EXECUTION: "an operation needed a value in the middle of the step: the {pending} traced so far "
    "would be compiled and executed here, and part of it a second time when the step ends",
}
_READY_COST = (
    "the value is computed already, so no graph would be split, but the host waits for the device in the middle of "
    "the step and copies the value: the device idles once per step"
)
_WAYS_OUT = {
    BreakKind.TENSOR_READ: "read it after the step{hint}, or keep it on the device (torch.where instead of `if`, "
    "an accumulating tensor instead of a Python sum)",
    BreakKind.CHECKPOINT_SAVE: "save after the step{hint}",
    BreakKind.DEVICE_SYNC: "drop the call: leaving the step executes it",
    BreakKind.COLLECTIVE_READ: "gather after the step{hint}",
    BreakKind.PROFILER_SCOPE: "open and close the scope on the same side of the step's edge: wholly inside the step "
    "or around all of it",
    BreakKind.HIDDEN_EXECUTION: "replace the operation by one with a fixed output shape (torch.where, masked_fill), "
    "or move it after the step{hint}",
}


def classify_read() -> BreakKind:
    """Whether the read under way is part of a save, of a collective, or stands for itself."""
    for frame in stack_frames(sys._getframe(1)):
        code = frame.f_code
        filename = code.co_filename.replace("\\", "/")
        if any(part in filename for part in _SAVING_FILES) or code.co_name in _SAVING_NAMES:
            return BreakKind.CHECKPOINT_SAVE
        if code.co_name == "__exit__" and filename.endswith(_PROFILER_FILE):
            return BreakKind.PROFILER_SCOPE
        if code.co_name in _COLLECTIVE_NAMES and any(part in filename for part in _COLLECTIVE_FILES):
            return BreakKind.COLLECTIVE_READ
    return BreakKind.TENSOR_READ


@dataclass
class BreakPolicy:
    """Turns a graph break into an error, a warning or nothing.

    Args:
        mode: as in `XLAConfig.on_graph_break`.
        step_name: the step's name, for the message.
        hint: where the host framework offers a place for reads, e.g. `" (in on_step_end)"`.
    """

    mode: OnGraphBreak
    step_name: str
    hint: str = ""

    def meet(self, kind: BreakKind, what: str, backend: Backend, *, ready: bool = False) -> None:
        """Raises (`"error"`), warns once per line (`"warn"`) or returns (`"allow"`).

        Args:
            kind: what would break the graph.
            what: the call, as the user knows it.
            backend: the seam.
            ready: the value concerned is already computed.

        Raises:
            GraphBreakError: the subclass for `kind`.
        """
        if self.mode == "allow":
            return
        location = current_location()
        if self.mode == "error":
            raise self.error(kind, what, location, backend.pending_count(), ready=ready)
        self.warn(kind, what, location, backend.pending_count(), ready=ready)

    def error(
        self, kind: BreakKind, what: str, location: Location | None, pending: int, *, ready: bool = False
    ) -> GraphBreakError:
        """The error for a break; not raised here."""
        where = location.called_from or location if location is not None else None
        return GRAPH_BREAK_ERRORS[kind](
            self._message(kind, what, location, pending, ready),
            filename=where.filename if where else None,
            lineno=where.lineno if where else None,
        )

    def warn(self, kind: BreakKind, what: str, location: Location | None, pending: int, *, ready: bool = False) -> None:
        """Says so once per line of the process."""
        key = (kind.value, location.filename if location else what, location.lineno if location else 0)
        if key in _warned:
            return
        _warned.add(key)
        warnings.warn(self._message(kind, what, location, pending, ready), GraphBreakWarning, stacklevel=2)

    def _message(self, kind: BreakKind, what: str, location: Location | None, pending: int, ready: bool) -> str:
        cost = _READY_COST if ready else _COSTS[kind].format(pending=_tensors(pending))
        second = (
            "this is reported once per line"
            if self.mode == "warn"
            else "set on_graph_break='warn': execute once what is pending, go on, and be told once per line"
        )
        return (
            f"{kind.value} inside the step {self.step_name!r}: {what}\n"
            f"  where: {location if location is not None else 'no Python line (inside an operator)'}\n"
            f"  cost: {cost}\n"
            f"  ways out: (1) {_WAYS_OUT[kind].format(hint=self.hint)}; (2) {second}"
        )


class GraphBreakWarning(UserWarning):
    """A graph break that `on_graph_break="warn"` let pass."""


_warned: set[tuple[str, str, int]] = set()


def _tensors(count: int) -> str:
    return "1 tensor" if count == 1 else f"{count} tensors"


def profiler_name(scope: object) -> str:
    """What messages call a profiler scope."""
    return f"the profiler scope {getattr(scope, 'name', '?')!r}"
