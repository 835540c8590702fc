"""`Tracing`: operations that are recorded instead of executed, and the graph that is pending."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Protocol

import torch

from xla_adapters.runtime.traced_tensors import TracedTensors


class RuntimeEvent(StrEnum):
    """A call of the runtime's own Python API while a step was being traced."""

    SYNC = "sync"
    WAIT = "wait"
    PROFILER_ENTER = "profiler enter"
    PROFILER_EXIT = "profiler exit"


class Tracing(Protocol):
    """Switches between executing and recording operations, and executes or discards what was recorded.

    While `eager()` is False, an operation on the device is recorded, and its result is pending: it has a shape and a
    dtype but no value yet. All pending tensors together are the outputs of the pending graph.
    """

    # ---- modes -----------------------------------------------------------------------------------

    def eager(self) -> bool:
        """Whether operations execute at once. One setting for all threads."""

    def set_eager(self, enabled: bool) -> None:
        """Executes operations at once from now on, or records them. Leaves what is pending as it is."""

    def execution_allowed(self) -> bool:
        """Whether a pending graph may be executed."""

    def set_execution_allowed(self, allowed: bool) -> None:
        """If not allowed, an execution does not happen, but raises what `is_forbidden_execution` recognizes."""

    def is_forbidden_execution(self, error: BaseException) -> bool:
        """Whether an error is the refusal to execute while that is not allowed."""

    def is_lost_value(self, error: BaseException) -> bool:
        """Whether an error says that a tensor has no value any more, as a refused execution may leave it."""

    def graph_name(self) -> str:
        """The name that graphs get in dumps and debug output."""

    def set_graph_name(self, name: str) -> None:
        """Names the graphs that are recorded from now on."""

    def constant_scalars(self) -> bool:
        """Whether the numbers 0 and 1 become constants of the graph, as other Python numbers never do."""

    def set_constant_scalars(self, enabled: bool) -> None:
        """Makes 0 and 1 constants from now on; or inputs, so that another number gives the same graph."""

    # ---- the pending graph -----------------------------------------------------------------------

    def pending_count(self) -> int:
        """How many live tensors are pending."""

    def is_pending(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the device is pending."""

    def are_pending(self, tensors: Sequence[torch.Tensor]) -> list[bool]:
        """`is_pending` of each of these tensors of the device; faster than to ask one by one."""

    def live_tensors(self) -> list[torch.Tensor]:
        """Every tensor of the device that Python code can reach. Slow (walks all objects): not for every step."""

    def graph_hash(self, outputs: Sequence[torch.Tensor]) -> str:
        """Names the pending graph of these tensors: the same operations on the same shapes give the same name."""

    def flush(self) -> None:
        """Executes what is pending. Does not advance the random stream."""

    def compute(self, tensors: Sequence[torch.Tensor]) -> None:
        """As `flush`, if one of these tensors is pending; much cheaper than `flush` if none is."""

    def finish_step(self) -> None:
        """Executes what is pending as one step: advances the random stream, and calls what waits for a step's end.

        Scopes of the runtime's profiler stay open.

        Raises:
            RuntimeError: the graph cannot be compiled or executed; see also `Device.is_out_of_memory`.
        """

    def discard_pending(self) -> None:
        """Forgets the pending graph. Tensors that were pending must not be read afterwards."""

    def begin_trace(self, traced: TracedTensors | None) -> None:
        """From now on the pending tensors are those of a trace of `Placeholders`; None: there is none any more.

        Raises:
            UnsupportedOptionError: the runtime has no placeholders.
        """

    def optimization_barrier(self, tensors: Sequence[torch.Tensor], after: Sequence[torch.Tensor] = ()) -> None:
        """Records a barrier: all these values are computed before anything that reads one of `tensors`.

        The compiler then neither merges nor repeats computations across it.

        Args:
            tensors: changed in place.
            after: further values that the barrier waits for.
        """

    # ---- what others do --------------------------------------------------------------------------

    def intercept(self, notify: Callable[[RuntimeEvent, object], bool]) -> AbstractContextManager[None]:
        """A context in which syncs, waits and profiler scopes are reported before they happen.

        Args:
            notify: called with the event and the first argument of the call, if any; returns whether the call is to
                happen. What it raises reaches the caller, and the call does not happen.
        """
