"""Operators along a sequence that torch_xla computes on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def _search_sorted(
    sorted_sequence: torch.Tensor,
    self: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: torch.Tensor | None = None,
) -> torch.Tensor:
    """Counts what stands before each value, which XLA does without storing the comparisons."""
    if sorter is not None:
        sorted_sequence = sorted_sequence.gather(-1, sorter)
    if isinstance(self, torch.Tensor):
        values = self.unsqueeze(-1)
        sequence = sorted_sequence.unsqueeze(-2) if self.ndim else sorted_sequence
    else:
        values, sequence = self, sorted_sequence
    # As torch compares, also with values that are not numbers.
    behind = sequence > values if right or side == "right" else sequence >= values
    return (~behind).sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


def _bucketize(
    self: torch.Tensor, boundaries: torch.Tensor, *, out_int32: bool = False, right: bool = False
) -> torch.Tensor:
    return _search_sorted(boundaries, self, out_int32=out_int32, right=right)


def _log_cumulative_sum_exp(self: torch.Tensor, dim: int) -> torch.Tensor:
    """Adds a copy that is shifted by 1, 2, 4, ..."""
    if self.ndim == 0:
        return self.clone()
    totals = self.float() if self.dtype.itemsize < 4 else self
    length, shift = self.shape[dim], 1
    while shift < length:
        before = totals.narrow(dim, 0, length - shift)
        nothing = torch.full_like(totals.narrow(dim, 0, shift), -torch.inf)
        totals = _log_add_exp(totals, torch.cat([nothing, before], dim))
        shift *= 2
    return totals.to(self.dtype)


def _log_add_exp(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """As torch's, with gradients of 0 where both are minus infinity, not NaN."""
    largest = torch.maximum(one, other).detach()
    largest = torch.where(largest.isinf(), 0.0, largest)
    total = (one - largest).exp() + (other - largest).exp()
    nothing = total == 0
    return torch.where(nothing, -torch.inf, torch.where(nothing, 1.0, total).log() + largest)


def _unfold(self: torch.Tensor, dimension: int, size: int, step: int) -> torch.Tensor:
    """`unfold` below the level where it is a view: windows along a dimension, whose elements are the last dimension."""
    if self.ndim == 0:
        return self.expand(size).clone()
    dim = dimension % self.ndim
    count = (self.shape[dim] - size) // step + 1
    starts = torch.arange(count, device=self.device) * step
    places = starts.unsqueeze(1) + torch.arange(size, device=self.device)
    chosen = torch.index_select(self, dim, places.reshape(-1))
    windows = chosen.reshape(*self.shape[:dim], count, size, *self.shape[dim + 1 :])
    return torch.permute_copy(windows, [*range(dim + 1), *range(dim + 2, windows.ndim), dim + 1])


KERNELS: Mapping[str, Callable[..., Any]] = {
    "searchsorted.Tensor": _search_sorted,
    "searchsorted.Scalar": _search_sorted,
    "bucketize.Tensor": _bucketize,
    **dict.fromkeys(("unfold", "unfold_copy"), _unfold),
}
# Written with operators that have a backward.
DIFFERENTIABLE: Mapping[str, Callable[..., Any]] = {"logcumsumexp": _log_cumulative_sum_exp}
