"""`XLATracing`: torch_xla's eager and lazy modes, and its pending graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property

import torch
import torch_xla

from xla_adapters.errors import UnsupportedOptionError
from xla_adapters.runtime.interface import Device, RuntimeEvent
from xla_adapters.runtime.torch_xla.interception import intercepted
from xla_adapters.runtime.torch_xla.live_tensors import live_tensors
from xla_adapters.runtime.traced_tensors import TracedTensors

_C = torch_xla._XLAC


class XLATracing:
    """`Tracing` on torch_xla's lazy tensors.

    Args:
        device: of the tensors.
    """

    def __init__(self, device: Device) -> None:
        self._device = device

    @cached_property
    def _device_name(self) -> str:
        return str(self._device.torch_device())

    # ---- modes -----------------------------------------------------------------------------------

    def eager(self) -> bool:
        """See `Tracing`."""
        return bool(_C._get_use_eager_mode())

    def set_eager(self, enabled: bool) -> None:
        """See `Tracing`."""
        _C._set_use_eager_mode(enabled)

    def execution_allowed(self) -> bool:
        """See `Tracing`."""
        return bool(_C._get_allow_execution())

    def set_execution_allowed(self, allowed: bool) -> None:
        """See `Tracing`."""
        _C._set_allow_execution(allowed)

    def is_forbidden_execution(self, error: BaseException) -> bool:
        """See `Tracing`."""
        return isinstance(error, RuntimeError) and "Unexpected execution happens inside" in str(error)

    def is_lost_value(self, error: BaseException) -> bool:
        """See `Tracing`."""
        return isinstance(error, RuntimeError) and has_neither(error)

    def graph_name(self) -> str:
        """See `Tracing`."""
        return str(_C._get_current_graph_name())

    def set_graph_name(self, name: str) -> None:
        """See `Tracing`."""
        _C._set_current_graph_name(name)

    def constant_scalars(self) -> bool:
        """See `Tracing`."""
        return bool(_C._get_xla_handle_special_scalars())

    def set_constant_scalars(self, enabled: bool) -> None:
        """See `Tracing`."""
        _C._set_xla_handle_special_scalars(enabled)

    # ---- the pending graph -----------------------------------------------------------------------

    def pending_count(self) -> int:
        """See `Tracing`."""
        try:
            return sum(_C._check_device_tensor_need_materialization(self._device_name))
        except RuntimeError as error:
            if not has_neither(error):
                raise
            return sum(self.is_pending(tensor) for tensor in self.live_tensors())

    def is_pending(self, tensor: torch.Tensor) -> bool:
        """See `Tracing`."""
        return self._any_pending([tensor])

    def are_pending(self, tensors: Sequence[torch.Tensor]) -> list[bool]:
        """See `Tracing`."""
        try:
            return list(_C._check_tensor_need_materialization(list(tensors)))
        except RuntimeError as error:
            if not has_neither(error):
                raise
            return list(map(self.is_pending, tensors))

    @staticmethod
    def _any_pending(tensors: Sequence[torch.Tensor]) -> bool:
        try:
            return any(_C._check_tensor_need_materialization(list(tensors)))
        except RuntimeError as error:
            if not has_neither(error):
                raise
            return True

    def live_tensors(self) -> list[torch.Tensor]:
        """See `Tracing`."""
        return live_tensors()

    def graph_hash(self, outputs: Sequence[torch.Tensor]) -> str:
        """See `Tracing`."""
        ordered = sorted(outputs, key=_C._xla_get_tensor_id)
        return bytes(_C._get_graph_hash(ordered)).hex()

    def flush(self) -> None:
        """See `Tracing`; unlike `torch_xla.sync`."""
        _C._xla_sync_live_tensors(self._device_name, [], False)

    def compute(self, tensors: Sequence[torch.Tensor]) -> None:
        """See `Tracing`. A tenth of what `flush` costs if none is pending."""
        if self._any_pending(tensors):
            self.flush()

    def finish_step(self) -> None:
        """See `Tracing`."""
        # Else a step could not stand inside an open `xp.Trace`.
        torch_xla.sync(reset_scope=False)

    def discard_pending(self) -> None:
        """See `Tracing`."""
        _C._clear_pending_irs(self._device_name)

    def begin_trace(self, traced: TracedTensors | None) -> None:
        """See `Tracing`."""
        raise UnsupportedOptionError("the runtime torch_xla has no placeholders")

    def optimization_barrier(self, tensors: Sequence[torch.Tensor]) -> None:
        """See `Tracing`."""
        for tensor in tensors:
            bring_up_to_date(tensor)
        if tensors:
            _C._xla_optimization_barrier_([torch._from_functional_tensor(tensor) for tensor in tensors])

    def intercept(self, notify: Callable[[RuntimeEvent, object], bool]) -> AbstractContextManager[None]:
        """See `Tracing`."""
        return intercepted(notify)


def bring_up_to_date(tensor: torch.Tensor) -> None:
    """Applies what was written to views of a tensor."""
    if torch._is_functional_tensor(tensor):
        torch._sync(tensor)  # type: ignore[attr-defined,no-untyped-call]


def has_neither(error: RuntimeError) -> bool:
    """Whether torch_xla met a tensor without value and graph: a refused execution leaves one behind."""
    return any(text in str(error) for text in ("XLATensor without XLAData and IR", "tensor_data"))
