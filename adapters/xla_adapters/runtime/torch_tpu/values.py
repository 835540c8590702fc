"""`TPUValues`: values behind TorchTPU's tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xla_adapters.runtime.torch_tpu.tracing import TPUTracing


class TPUValues:
    """`Values` on TorchTPU.

    A step never writes into the buffer that a tensor had before it: there the tensor is a placeholder. So a snapshot
    of a tensor with a value copies nothing. One of a pending tensor is a clone, which costs the program nothing.

    Args:
        tracing: tells which tensors are pending.
    """

    def __init__(self, tracing: TPUTracing) -> None:
        self._tracing = tracing

    def snapshot(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Values`."""
        value = tensor.detach()
        if not self._tracing.is_pending(tensor):
            return value
        value = value.clone()
        assert self._tracing.traced is not None
        self._tracing.traced.add(value)
        return value

    def bring_up_to_date(self, tensor: torch.Tensor) -> None:
        """See `Values`; views are always up to date."""

    def twin(self, snapshot: torch.Tensor) -> torch.Tensor:
        """See `Values`."""
        return snapshot

    def rewrite(self, snapshot: torch.Tensor, twin: torch.Tensor) -> None:
        """See `Values`; nothing changes a snapshot."""

    def holds(self, tensor: torch.Tensor, snapshot: torch.Tensor) -> bool:
        """See `Values`."""
        same = tensor.untyped_storage()._cdata == snapshot.untyped_storage()._cdata
        return same and not self._tracing.is_pending(tensor)

    def restore(self, tensor: torch.Tensor, snapshot: torch.Tensor) -> None:
        """See `Values`; views made before the step keep the value from before the step."""
        tensor.data = snapshot

    def write(self, tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """See `Values`; only the tensors themselves see the value."""
        for tensor, value in zip(tensors, [value.detach() for value in values], strict=True):
            tensor.data = value

    def copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `Values`."""
        return [tensor.detach().clone() for tensor in tensors]
