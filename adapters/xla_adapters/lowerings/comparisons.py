"""Comparisons of floats with a Python number, in the dtype of the tensor.

torch rounds the number to the tensor's dtype. torch_xla 2.9 compares in float64 instead: `x == 0.3` is false for a
float32 `x` of 0.3, and `x <= 0.1` for a bfloat16 `x` of 0.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_NAMES = "eq ne lt le gt ge less less_equal greater greater_equal not_equal"


def _comparing(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    def compare(input: torch.Tensor, other: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(other, (int, float)) and input.is_floating_point():
            other = torch.full((), other, dtype=input.dtype, device=input.device)
        result: torch.Tensor = function(input, other, **kwargs)
        return result

    return compare


COMPARISONS: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {
    function: _comparing(function)
    for function in (
        *(getattr(owner, name) for owner in (torch, torch.Tensor) for name in _NAMES.split()),
        # `x == y` is this one, while `x < y` is `torch.Tensor.lt`.
        torch.Tensor.__eq__,
    )
}
