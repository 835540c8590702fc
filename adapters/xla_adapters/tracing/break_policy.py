"""`BreakPolicy`: the error or warning for a `Break` of the graph. `ProfilerScopes`: those that cross a step's edge."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import CodeType

from xla_adapters.config import OnGraphBreak
from xla_adapters.errors import GRAPH_BREAK_ERRORS, BreakKind, GraphBreakError, GraphBreakWarning
from xla_adapters.runtime import Runtime
from xla_adapters.tracing.remedies import remedy_of
from xla_adapters.utils.location import Location, current_location, stack_frames, warn_at

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
    BreakKind.HOST_OPERATOR: "its inputs are copied to the host and its result back: the {pending} traced so far would "
    "be compiled and executed here, and the rest of the step becomes a second graph",
    BreakKind.HIDDEN_EXECUTION: "an operation needed a value in the middle of the step: the {pending} traced so far "
    "would be compiled and executed here, and part of it a second time when the step ends",
}
_READY_COST = (
    "the value is computed already, so no graph would be split, but the host waits for the device in the middle of "
    "the step and copies the value: the device idles once per step"
)
_REMEDIES = {
    BreakKind.TENSOR_READ: "read it after the step{hint}, or keep it on the device (torch.where instead of `if`, "
    "an accumulating tensor instead of a Python sum)",
    BreakKind.CHECKPOINT_SAVE: "save after the step{hint}",
    BreakKind.DEVICE_SYNC: "drop the call: leaving the step executes it",
    BreakKind.COLLECTIVE_READ: "gather after the step{hint}",
    BreakKind.PROFILER_SCOPE: "open and close the scope on the same side of the step's edge: wholly inside the step "
    "or around all of it",
    BreakKind.HOST_OPERATOR: "compute it outside of the step (in the dataset, if it needs no weights), or with "
    "operators that the device has",
    BreakKind.HIDDEN_EXECUTION: "replace the operation by one with a fixed output shape (torch.where, masked_fill), "
    "or move it after the step{hint}",
}


def classify_read() -> BreakKind:
    """The kind of the present read, found from the call stack: part of a save, a collective, a profiler, or none."""
    for frame in stack_frames(sys._getframe(1)):
        code = frame.f_code
        filename = code.co_filename.replace("\\", "/")
        if _is_saving(code):
            return BreakKind.CHECKPOINT_SAVE
        if code.co_name == "__exit__" and filename.endswith(_PROFILER_FILE):
            return BreakKind.PROFILER_SCOPE
        if code.co_name in _COLLECTIVE_NAMES and any(part in filename for part in _COLLECTIVE_FILES):
            return BreakKind.COLLECTIVE_READ
    return BreakKind.TENSOR_READ


def kind_of_error(error: BaseException) -> BreakKind:
    """The kind of an execution that the runtime has refused by an error, found from its traceback."""
    traceback = error.__traceback__
    while traceback is not None:
        if _is_saving(traceback.tb_frame.f_code):
            return BreakKind.CHECKPOINT_SAVE
        traceback = traceback.tb_next
    return BreakKind.HIDDEN_EXECUTION


def _is_saving(code: CodeType) -> bool:
    filename = code.co_filename.replace("\\", "/")
    return any(part in filename for part in _SAVING_FILES) or code.co_name in _SAVING_NAMES


@dataclass(frozen=True, kw_only=True)
class Break:
    """What splits the graph of a step, or would.

    Attributes:
        kind: of break.
        what: the call, as the user knows it.
        location: the line that does it; None if it is not known.
        pending: how many tensors are traced so far.
        ready: whether the value is already computed, so that nothing is split.
        backward: for what the backward does, the line that called it; `location` is then a line of the forward.
        operators: torch's names of what was computed on the host.
    """

    kind: BreakKind
    what: str
    location: Location | None
    pending: int
    ready: bool = False
    backward: Location | None = None
    operators: tuple[str, ...] = ()

    @property
    def user_line(self) -> Location | None:
        """The line of the user's code; for a forward in a library, the one that called the backward."""
        location = self.location
        if location is not None and self.backward is not None and not location.is_user_code:
            location = self.backward
        return location.called_from or location if location is not None else None


@dataclass
class BreakPolicy:
    """Turns a graph break into an error, a warning or nothing.

    Args:
        mode: as in `XLAConfig.on_graph_break`.
        step_name: the step's name, for the message.
        hint: where in the host framework a value can be read, e.g. `" (in on_step_end)"`.
        splits: whether a step can be executed in several parts, under another `mode`.
    """

    mode: OnGraphBreak
    step_name: str
    hint: str = ""
    splits: bool = True

    def meet(self, kind: BreakKind, what: str, runtime: Runtime, *, ready: bool = False) -> None:
        """Raises (mode `"error"`), warns once per line (`"warn"`) or does nothing (`"allow"`) of what happens here.

        Args:
            kind: what would break the graph.
            what: the call, as the user knows it.
            runtime: the runtime.
            ready: whether the value is already computed.

        Raises:
            GraphBreakError: the subclass for `kind`.
        """
        if self.mode == "allow":
            return
        pending = runtime.tracing.pending_count()
        self.tell(Break(kind=kind, what=what, location=current_location(), pending=pending, ready=ready))

    def tell(self, found: Break) -> None:
        """As `meet`, of a break that was met already.

        Raises:
            GraphBreakError: the subclass for its kind.
        """
        if self.mode == "error":
            raise self.error(found)
        if self.mode == "warn":
            self._warn(found)

    def error(self, found: Break) -> GraphBreakError:
        """The error for a break; not raised here."""
        where = found.user_line
        return GRAPH_BREAK_ERRORS[found.kind](
            self._message(found),
            filename=where.filename if where else None,
            lineno=where.lineno if where else None,
        )

    def _warn(self, found: Break) -> None:
        """Warns of a break, once per line of code in this process."""
        location = found.location
        key = (found.kind.value, location.filename if location else found.what, location.lineno if location else 0)
        if key in _warned:
            return
        _warned.add(key)
        warn_at(found.user_line, self._message(found), GraphBreakWarning)

    def tell_of_split(self, what: str, location: Location) -> None:
        """Warns once per line that a read of a known library executes the step in two parts; not in mode `"allow"`."""
        key = ("split", location.filename, location.lineno)
        if self.mode == "allow" or key in _warned:
            return
        _warned.add(key)
        message = (
            f"{location.place} in {location.function} ({what}) decides by a value that the step "
            f"{self.step_name!r} computes: the step is executed in two parts there (told once)"
        )
        warn_at(location, message, GraphBreakWarning)

    def _message(self, found: Break) -> str:
        cost = _READY_COST if found.ready else _COSTS[found.kind]
        first = remedy_of(found.operators or (found.what,)) or _REMEDIES[found.kind].format(hint=self.hint)
        second = (
            "this is reported once per line"
            if self.mode == "warn"
            else "set on_graph_break='warn': execute once what is pending, go on, and be told once per line"
        )
        backward = f"\n         in its backward, called from {found.backward}" if found.backward is not None else ""
        if not self.splits:
            return (
                f"{found.kind.value} inside the step {self.step_name!r}: {found.what}\n"
                f"  where: {found.location if found.location is not None else 'no Python line (inside an operator)'}"
                f"{backward}\n"
                f"  cost: nothing of the step is computed before its end\n"
                f"  remedy: {first}"
            )
        return (
            f"{found.kind.value} inside the step {self.step_name!r}: {found.what}\n"
            f"  where: {found.location if found.location is not None else 'no Python line (inside an operator)'}"
            f"{backward}\n"
            f"  cost: {cost.format(pending=_tensors(found.pending))}\n"
            f"  remedies: (1) {first}; (2) {second}"
        )


_warned: set[tuple[str, str, int]] = set()


def _tensors(count: int) -> str:
    return "1 tensor" if count == 1 else f"{count} tensors"


class ProfilerScopes:
    """The open profiler scopes of a step. A scope must open and close inside the step, or outside of it.

    Args:
        policy: applied to a scope that crosses an edge of the step.
        runtime: the runtime.
    """

    def __init__(self, policy: BreakPolicy, runtime: Runtime) -> None:
        self._policy = policy
        self._runtime = runtime
        self._open: list[object] = []

    def enter(self, scope: object) -> None:
        """Called when a scope is opened."""
        self._open.append(scope)

    def exit(self, scope: object) -> None:
        """Called when a scope is closed.

        Raises:
            ProfilerScopeError: it was opened before the step, under `on_graph_break="error"`.
        """
        if scope in self._open:
            self._open.remove(scope)
        else:
            self._meet(scope, "was opened before the step and is closed inside")

    def refuse_open_ones(self) -> None:
        """Called when the step ends.

        Raises:
            ProfilerScopeError: a scope is open, under `on_graph_break="error"`.
        """
        if self._open:
            self._meet(self._open[-1], "was opened inside and is still open")

    def _meet(self, scope: object, what: str) -> None:
        name = f"the profiler scope {getattr(scope, 'name', '?')!r}"
        self._policy.meet(BreakKind.PROFILER_SCOPE, f"{name} {what}", self._runtime)
