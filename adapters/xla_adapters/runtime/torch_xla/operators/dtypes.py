"""Arguments of several dtypes, which torch_xla 2.9 refuses, or computes in another than it says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from xla_adapters.runtime.torch_xla.operators.few_elements import reduced


def _where(
    stock: Callable[..., torch.Tensor], condition: torch.Tensor, self: torch.Tensor, other: torch.Tensor
) -> torch.Tensor:
    """Chooses between whole tensors: of a single value, GSPMD cuts the others not along the batch, and sends them."""
    dtype = torch.result_type(self, other)
    shape = torch.broadcast_shapes(condition.shape, self.shape, other.shape)
    self, other = (tensor if tensor.ndim else tensor.expand(shape) for tensor in (self, other))
    return stock(condition, self.to(dtype), other.to(dtype))


def _masked_fill(self: torch.Tensor, mask: torch.Tensor, value: torch.Tensor | float) -> torch.Tensor:
    """See `_where`."""
    if mask.dtype is not torch.bool:
        raise RuntimeError(f"masked_fill only supports boolean masks, but got mask with dtype {mask.dtype}")
    if isinstance(value, torch.Tensor):
        if value.ndim:
            raise RuntimeError(f"masked_fill takes a 0-dimensional value, but got one of {value.ndim} dimensions")
        return torch.where(mask, value.to(self.dtype).expand_as(self), self)
    return torch.where(mask, torch.full_like(self, value), self)


def _mean(
    stock: Callable[..., torch.Tensor], self: torch.Tensor, *args: Any, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Of integers, too."""
    return stock(self if dtype is None else self.to(dtype), *args, dtype=dtype)


def _mean_along(stock: Callable[..., torch.Tensor], self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    result: torch.Tensor = reduced(partial(_mean, stock), self, *args, **options)
    return result


KERNELS: dict[str, Callable[..., torch.Tensor]] = {
    "masked_fill.Scalar": _masked_fill,
    "masked_fill.Tensor": _masked_fill,
}
# Their first argument is torch_xla's kernel.
AROUND_STOCK: dict[str, Callable[..., torch.Tensor]] = {
    "where.self": _where,
    "mean": _mean,
    "mean.dim": _mean_along,
}
