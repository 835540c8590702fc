"""Slices that begin before the first element (`x[-100:]` of 16), which torch_xla 2.9 refuses ("Value out of range")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _slice(
    stock: Callable[..., torch.Tensor],
    self: torch.Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> torch.Tensor:
    """`slice` and `slice_copy`; bounds before the first element are the first one."""
    return stock(self, dim, *_clamped(self, dim, start, end), step)


def _slice_scatter(
    stock: Callable[..., torch.Tensor],
    self: torch.Tensor,
    src: torch.Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> torch.Tensor:
    """`slice_scatter`, which writes through what `slice` gives."""
    return stock(self, src, dim, *_clamped(self, dim, start, end), step)


def _slice_backward(
    stock: Callable[..., torch.Tensor],
    grad_output: torch.Tensor,
    input_sizes: list[int],
    dim: int,
    start: int,
    end: int,
    step: int,
) -> torch.Tensor:
    size = input_sizes[dim]
    return stock(grad_output, input_sizes, dim, max(start, -size), max(end, -size), step)


def _clamped(tensor: torch.Tensor, dim: int, *bounds: int | None) -> list[int | None]:
    size = tensor.shape[dim] if tensor.ndim else 0
    return [None if bound is None else max(bound, -size) for bound in bounds]


# Kernels whose first argument is torch_xla's own.
AROUND_STOCK: dict[str, Callable[..., Any]] = {
    "slice.Tensor": _slice,
    "slice_copy.Tensor": _slice,
    "slice_scatter": _slice_scatter,
    "slice_backward": _slice_backward,
}
