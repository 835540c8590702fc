"""Extremes over all dimensions, which torch_xla 2.9 takes for those over none, and of tensors of no dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def _extreme(
    stock: Callable[..., torch.Tensor], input: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False
) -> torch.Tensor:
    if input.ndim == 0:
        return stock(input.reshape(1), [0], False)
    return stock(input, list(dim) or list(range(input.ndim)), keepdim)


# Their first argument is torch_xla's kernel.
AROUND_STOCK: dict[str, Callable[..., Any]] = {"amax": _extreme, "amin": _extreme}
