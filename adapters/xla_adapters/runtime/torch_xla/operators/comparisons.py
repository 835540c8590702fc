"""Comparisons of floats with a Python number, which torch rounds to the dtype of the tensor.

torch_xla 2.9 compares in float64 instead: `x == 0.3` is false for a float32 `x` of 0.3, and `x <= 0.1` for a bfloat16
`x` of 0.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _compare(stock: Callable[..., torch.Tensor], self: torch.Tensor, other: float) -> torch.Tensor:
    if self.is_floating_point():
        # In float64 the rounded number compares as in the tensor's dtype.
        with torch._C.DisableTorchFunction():
            other = torch.tensor(other, dtype=self.dtype, device="cpu").item()
    return stock(self, other)


# Kernels whose first argument is torch_xla's own.
AROUND_STOCK: dict[str, Callable[..., Any]] = dict.fromkeys(
    (f"{name}.Scalar" for name in ("eq", "ne", "lt", "le", "gt", "ge")), _compare
)
