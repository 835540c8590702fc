"""Arguments of several dtypes, which torch_xla 2.9 refuses, or computes in another than it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _where(
    stock: Callable[..., torch.Tensor], condition: torch.Tensor, self: torch.Tensor, other: torch.Tensor
) -> torch.Tensor:
    if self.dtype is other.dtype:
        return stock(condition, self, other)
    dtype = torch.result_type(self, other)
    return stock(condition, self.to(dtype), other.to(dtype))


def _mean(
    stock: Callable[..., torch.Tensor], self: torch.Tensor, *args: Any, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Of integers, too."""
    return stock(self if dtype is None else self.to(dtype), *args, dtype=dtype)


# Their first argument is torch_xla's kernel.
AROUND_STOCK: dict[str, Callable[..., torch.Tensor]] = {
    "where.self": _where,
    **dict.fromkeys(("mean", "mean.dim"), _mean),
}
