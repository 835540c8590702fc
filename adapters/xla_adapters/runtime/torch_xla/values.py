"""`XLAValues`: values behind torch_xla's tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch_xla

from xla_adapters.runtime.interface import Device, Executables, Tracing

_C = torch_xla._XLAC


class XLAValues:
    """`Values` on torch_xla, where a snapshot copies nothing: XLA values never change in place.

    Args:
        device: of the tensors.
        tracing: tells which values are pending.
        executables: copy values.
    """

    def __init__(self, device: Device, tracing: Tracing, executables: Executables) -> None:
        self._device = device
        self._tracing = tracing
        self._executables = executables

    def snapshot(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Values`."""
        torch._functionalize_sync(tensor)
        return torch._from_functional_tensor(tensor)

    def bring_up_to_date(self, tensor: torch.Tensor) -> None:
        """See `Values`."""
        torch._functionalize_sync(tensor)

    def second_copy(self, snapshot: torch.Tensor) -> torch.Tensor:
        """See `Values`; shares the buffer."""
        if self._device.is_spmd() or self._tracing.is_pending(snapshot):
            return torch._from_functional_tensor(snapshot.clone())
        # Not a clone: that would be pending, and lost with the graph that cannot be compiled. (Under SPMD this would be
        # another graph: it does not know how it lies on the devices.)
        _, (value,) = _C._get_tensors_xla_device_data_node([snapshot])
        return torch._from_functional_tensor(value)

    def rewrite(self, snapshot: torch.Tensor, second_copy: torch.Tensor) -> None:
        """See `Values`."""
        snapshot.copy_(second_copy)

    def holds(self, tensor: torch.Tensor, snapshot: torch.Tensor, second_copy: torch.Tensor | None = None) -> bool:
        """See `Values`."""
        inner = self.snapshot(tensor)
        if _C._xla_get_tensor_id(inner) != _C._xla_get_tensor_id(snapshot) or self._tracing.is_pending(inner):
            return False
        if second_copy is None or self._tracing.is_pending(second_copy):
            return True
        # `copy_` leaves the inner tensor with the buffer of another one, and nothing pending.
        now, before = _C._get_tensors_handle([snapshot, second_copy])
        return bool(now == before)

    def restore(self, tensor: torch.Tensor, snapshot: torch.Tensor) -> None:
        """See `Values`."""
        torch._functionalize_replace(tensor, snapshot)
        torch._functionalize_commit_update(tensor)

    def write(self, tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """See `Values`."""
        inner, replace = torch._from_functional_tensor, torch._functionalize_replace
        commit = torch._functionalize_commit_update
        # All values before the first write: a value may be one of the tensors.
        for tensor, value in zip(tensors, list(map(inner, values)), strict=True):
            replace(tensor, value)
            commit(tensor)

    def copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `Values`."""
        executables, eager = self._executables, self._tracing.eager()
        # Executed by itself, a clone is the same buffer again; a graph's results never are its inputs.
        self._tracing.set_eager(False)
        try:
            outputs = [torch._from_functional_tensor(tensor.detach().clone()) for tensor in tensors]
            name = executables.compile(outputs, [])
            return executables.run(name, [item.value for item in executables.inputs(outputs)])
        finally:
            self._tracing.set_eager(eager)
