"""Questions that torch's own Python asks about values, answered inside a step without a read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch


def _is_all_true(valid: torch.Tensor) -> torch.Tensor | bool:
    """As `torch._is_all_true`; but what `torch.distributions` checks of its arguments counts as valid.

    Args:
        valid: for each value whether it is valid.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("xla_adapters."):
        frame = frame.f_back
    if frame.f_globals.get("__name__", "").startswith("torch.distributions."):
        return True
    return torch._is_all_true(valid)


def _is_left_aligned(values: torch.Tensor, mask: torch.Tensor) -> bool:
    """As `torch._nested_tensor_from_mask_left_aligned`: `TransformerEncoder` asks before it makes a nested tensor.

    The device has no nested tensors: the layers compute with the mask instead.
    """
    return False


CHECKS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch._is_all_true: _is_all_true,
    torch._nested_tensor_from_mask_left_aligned: _is_left_aligned,
}
