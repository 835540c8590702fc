"""Operators that torch_xla 2.9 computes wrongly for some dimensions or strides, and for others as the CPU does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def _along_first(
    stock: Callable[..., torch.Tensor],
    self: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """`index_add` and `index_copy`: right along the first dimension only, which there has to be."""
    if self.ndim == 0:
        one, position, added = (tensor.reshape(1) for tensor in (self, index, source))
        return stock(one, 0, position, added, **options).reshape(())
    if self.ndim < 2 or dim in (0, -self.ndim):
        return stock(self, dim, index, source, **options)
    swapped = stock(torch.transpose_copy(self, 0, dim), 0, index, torch.transpose_copy(source, 0, dim), **options)
    return torch.transpose_copy(swapped, 0, dim)


def _diagonal(
    stock: Callable[..., torch.Tensor], self: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> torch.Tensor:
    """`diagonal`: right with the last two dimensions only."""
    order = _with_these_last(self.ndim, dim1, dim2)
    if sorted(order[-2:]) == [self.ndim - 2, self.ndim - 1]:
        return stock(self, offset, dim1, dim2)
    return stock(torch.permute_copy(self, order), offset, self.ndim - 2, self.ndim - 1)


def _diagonal_scatter(
    stock: Callable[..., torch.Tensor],
    self: torch.Tensor,
    src: torch.Tensor,
    offset: int = 0,
    dim1: int = 0,
    dim2: int = 1,
) -> torch.Tensor:
    """`diagonal_scatter`, which writes through what `diagonal` gives."""
    order = _with_these_last(self.ndim, dim1, dim2)
    if sorted(order[-2:]) == [self.ndim - 2, self.ndim - 1]:
        return stock(self, src, offset, dim1, dim2)
    written = stock(torch.permute_copy(self, order), src, offset, self.ndim - 2, self.ndim - 1)
    return torch.permute_copy(written, [order.index(dim) for dim in range(self.ndim)])


def _with_these_last(rank: int, dim1: int, dim2: int) -> list[int]:
    last = [dim1 % rank, dim2 % rank]
    return [dim for dim in range(rank) if dim not in last] + last


def _as_strided_scatter(
    stock: Callable[..., torch.Tensor],
    self: torch.Tensor,
    src: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> torch.Tensor:
    """`as_strided_scatter`, of which the backward of `as_strided` is made, by the positions of the elements."""
    positions = torch.full((), storage_offset or 0, dtype=torch.long, device=self.device)
    for length, step in zip(size, stride, strict=True):
        positions = positions.unsqueeze(-1) + torch.arange(length, device=self.device) * step
    flat = torch.scatter(self.reshape(-1), 0, positions.reshape(-1), src.reshape(-1))
    return flat.reshape(self.shape)


# Kernels whose first argument is torch_xla's own.
AROUND_STOCK: dict[str, Callable[..., Any]] = {
    "index_add": _along_first,
    "index_copy": _along_first,
    "as_strided_scatter": _as_strided_scatter,
    "diagonal": _diagonal,
    "diagonal_copy": _diagonal,
    "diagonal_scatter": _diagonal_scatter,
}
