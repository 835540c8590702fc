"""Reductions of what is written to one place, the backward of `masked_scatter`, and indices of several dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch


def _scatter_reduce(
    stock: Callable[..., torch.Tensor],
    self: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    src: torch.Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> torch.Tensor:
    """`scatter_reduce.two`, for which torch_xla 2.9 has neither means nor `include_self=False`."""
    if index.numel() == 0:
        return self.clone()
    if not self.ndim:
        row, position, source = (one.reshape(1) for one in (self, index, src))
        return _scatter_reduce(stock, row, dim, position, source, reduce, include_self=include_self).reshape(())
    for each, length in enumerate(index.shape):
        # Of the source torch reads the part that the index covers.
        src = torch.narrow_copy(src, each, 0, length) if src.shape[each] > length else src
    if not include_self:
        self = torch.scatter(self, dim, index, _neutral(self.dtype, reduce))
    if reduce != "mean":
        return stock(self, dim, index, src, reduce, include_self=True)
    total = stock(self, dim, index, src, "sum", include_self=True)
    # Where nothing was written the value counts itself, whether it is to be included or not.
    count = torch.ones_like(self) if include_self else torch.zeros_like(self)
    count = torch.scatter_add(count, dim, index, torch.ones_like(src)).clamp(min=1)
    whole = not self.is_floating_point() and not self.is_complex()
    return torch.div(total, count, rounding_mode="floor") if whole else total / count


def _neutral(dtype: torch.dtype, reduce: str) -> float | int:
    if reduce in ("sum", "mean"):
        return 0
    if reduce == "prod":
        return 1
    if dtype.is_floating_point:
        return -math.inf if reduce == "amax" else math.inf
    limits = torch.iinfo(dtype)
    return limits.min if reduce == "amax" else limits.max


def _masked_scatter_backward(grad: torch.Tensor, mask: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The gradient of the source, whose first values went to where the mask is true."""
    elements = math.prod(sizes)
    chosen = mask.expand(grad.shape).reshape(-1)
    # What was not chosen is added to one place more, which is left out.
    place = torch.where(chosen, torch.cumsum(chosen.long(), 0) - 1, elements).clamp(max=elements)
    flat = torch.zeros(elements + 1, dtype=grad.dtype, device=grad.device).scatter_add(0, place, grad.reshape(-1))
    return torch.narrow_copy(flat, 0, 0, elements).reshape(sizes)


def _indexed(
    stock: Callable[..., torch.Tensor], self: torch.Tensor, indices: Sequence[torch.Tensor | None], *args: Any
) -> torch.Tensor:
    """`index.Tensor` and `index_put_`, also where one index has 32 bits and another 64."""
    wholes = {index.dtype for index in indices if index is not None} - {torch.bool, torch.uint8}
    if len(wholes) > 1:
        indices = [index.long() if index is not None and index.dtype in wholes else index for index in indices]
    return stock(self, indices, *args)


KERNELS: dict[str, Callable[..., Any]] = {"masked_scatter_backward": _masked_scatter_backward}
# Their first argument is torch_xla's kernel.
AROUND_STOCK: dict[str, Callable[..., Any]] = {
    "scatter_reduce.two": _scatter_reduce,
    **dict.fromkeys(("index.Tensor", "index_put_"), _indexed),
}
