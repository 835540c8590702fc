"""`TPUTracing`: there is no pending graph outside of a trace of `Placeholders`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch_tpu._internal.sync import sync as _sync

from xla_adapters.runtime.interface import RuntimeEvent
from xla_adapters.runtime.traced_tensors import TracedTensors

# What torch_tpu says when a value is read in a trace.
_READS = ("during an FX trace", "materialization failed", "cannot Materialize() a placeholder")


class TPUTracing:
    """`Tracing` on TorchTPU, where each operation outside of a step is executed at once.

    Attributes:
        traced: the tensors of the present trace, which are pending; None outside of steps.
    """

    def __init__(self) -> None:
        self.traced: TracedTensors | None = None
        self._name = ""

    # ---- modes -----------------------------------------------------------------------------------

    def eager(self) -> bool:
        """See `Tracing`."""
        return True

    def set_eager(self, enabled: bool) -> None:
        """See `Tracing`; there is no other mode than eager, except in a trace."""

    def execution_allowed(self) -> bool:
        """See `Tracing`."""
        return True

    def set_execution_allowed(self, allowed: bool) -> None:
        """See `Tracing`; a read of a value without a value always raises."""

    def is_forbidden_execution(self, error: BaseException) -> bool:
        """See `Tracing`."""
        return isinstance(error, RuntimeError) and any(text in str(error) for text in _READS)

    def is_lost_value(self, error: BaseException) -> bool:
        """See `Tracing`; a placeholder keeps its place."""
        return False

    def graph_name(self) -> str:
        """See `Tracing`."""
        return self._name

    def set_graph_name(self, name: str) -> None:
        """See `Tracing`."""
        self._name = name

    def constant_scalars(self) -> bool:
        """See `Tracing`; all numbers are, except those that a step makes inputs."""
        return True

    def set_constant_scalars(self, enabled: bool) -> None:
        """See `Tracing`; a step makes the numbers of optimizers inputs anyway."""

    # ---- the pending graph -----------------------------------------------------------------------

    def pending_count(self) -> int:
        """See `Tracing`."""
        return 0 if self.traced is None else len(self.traced.alive())

    def is_pending(self, tensor: torch.Tensor) -> bool:
        """See `Tracing`."""
        return self.traced is not None and self.traced.has(tensor)

    def are_pending(self, tensors: Sequence[torch.Tensor]) -> list[bool]:
        """See `Tracing`."""
        return list(map(self.is_pending, tensors))

    def live_tensors(self) -> list[torch.Tensor]:
        """See `Tracing`; those of the trace only."""
        return [] if self.traced is None else self.traced.alive()

    def graph_hash(self, outputs: Sequence[torch.Tensor]) -> str:
        """See `Tracing`; a trace knows its program only at its end, and nothing is pending otherwise."""
        raise NotImplementedError

    def flush(self) -> None:
        """See `Tracing`; launches what the thread that launches eager operations has not come to."""
        _sync.synchronize()

    def compute(self, tensors: Sequence[torch.Tensor]) -> None:
        """See `Tracing`; nothing is pending."""

    def finish_step(self) -> None:
        """See `Tracing`; nothing is pending, and eager operations have moved the random stream."""

    def discard_pending(self) -> None:
        """See `Tracing`."""
        self.traced = None

    def begin_trace(self, traced: TracedTensors | None) -> None:
        """See `Tracing`."""
        self.traced = traced

    def optimization_barrier(self, tensors: Sequence[torch.Tensor], after: Sequence[torch.Tensor] = ()) -> None:
        """See `Tracing`; outside of a trace each operation is executed by itself, and nothing is to be kept apart."""
        if self.traced is None or not tensors:
            return
        # The values are the same, so that neither autograd nor a mode need know.
        unnoted = torch.autograd._unsafe_preserve_version_counter(tuple(tensors))  # type: ignore[attr-defined]
        with torch.no_grad(), torch._C.DisableTorchFunction(), unnoted:
            behind = torch.tpu.ops.optimization_barrier([*tensors, *after])  # type: ignore[attr-defined]
            for tensor, value in zip(tensors, behind, strict=False):
                tensor.copy_(value)

    # ---- what others do --------------------------------------------------------------------------

    @contextmanager
    def intercept(self, notify: Callable[[RuntimeEvent, object], bool]) -> Iterator[None]:
        """See `Tracing`."""

        def reporting(call: Callable[..., Any]) -> Callable[..., Any]:
            def reported(*args: Any, **kwargs: Any) -> Any:
                happens = notify(RuntimeEvent.WAIT, args[0] if args else None)
                return call(*args, **kwargs) if happens else None

            return reported

        patched = [(torch.accelerator, torch.accelerator.synchronize), (torch.tpu, torch.tpu.synchronize)]  # type: ignore[attr-defined]
        try:
            for owner, original in patched:
                owner.synchronize = reporting(original)
            yield
        finally:
            for owner, original in patched:
                owner.synchronize = original
