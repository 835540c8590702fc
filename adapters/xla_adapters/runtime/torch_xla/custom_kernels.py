"""`XLACustomKernels`: torch_xla's user computations, and kernels of torch's dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch_xla

from xla_adapters.runtime.interface import Tracing
from xla_adapters.runtime.torch_xla.operators import kernel_replaced
from xla_adapters.runtime.torch_xla.tracing import bring_up_to_date

_C = torch_xla._XLAC

# Computations that need not be read again.
_KEPT = 4096


class XLACustomKernels:
    """`CustomKernels` on torch_xla.

    Args:
        tracing: tells which tensors are pending.
    """

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._called: dict[bytes, Any] = {}

    def call(self, computation: bytes, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `CustomKernels`."""
        made = self._called.get(computation)
        if made is None:
            if len(self._called) >= _KEPT:
                del self._called[next(iter(self._called))]
            made = self._called[computation] = _C._xla_op_computation_from_module_proto("computation", computation)
        return list(_C._xla_user_computation("xla_adapters::computation", list(inputs), made))

    def replaced(self, name: str, kernel: Callable[..., torch.Tensor]) -> AbstractContextManager[None]:
        """See `CustomKernels`."""
        return kernel_replaced(name, kernel)

    def compute_once(self, tensor: torch.Tensor) -> None:
        """See `CustomKernels`."""
        bring_up_to_date(tensor)
        if self._tracing.is_pending(tensor):
            _C._xla_optimization_barrier_([torch._from_functional_tensor(tensor)])
