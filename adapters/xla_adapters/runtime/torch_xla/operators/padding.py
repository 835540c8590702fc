"""Reflection and replication with negative sizes, which cut; torch_xla 2.9 takes sizes that are not negative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def _pad(stock: Callable[..., torch.Tensor], self: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
    """Pads first: what is cut away can be reflected at the other end."""
    if min(padding) >= 0:
        return stock(self, padding)
    result = stock(self, [max(size, 0) for size in padding])
    for index in range(len(padding) // 2):
        dim = self.ndim - 1 - index
        before, after = (max(-size, 0) for size in padding[2 * index : 2 * index + 2])
        result = result.narrow(dim, before, result.shape[dim] - before - after)
    return result


# Their first argument is torch's kernel.
AROUND_STOCK: dict[str, Callable[..., Any]] = {
    f"{kind}_pad{dims}d": _pad for kind in ("reflection", "replication") for dims in (1, 2, 3)
}
