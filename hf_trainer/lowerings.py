"""Operators that torch_xla hands to the CPU in the middle of the step, written in ones it traces."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from xla_adapters import get_backend


def weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """As `torch._weight_norm`, in the form torch itself uses where it has no fused kernel."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


def histc(input: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """As `torch.histc`: a scatter instead of a loop over values."""
    values = input.reshape(-1)
    low, high = torch.as_tensor(min, device=input.device), torch.as_tensor(max, device=input.device)
    if min == max:
        # Its way of saying: from the smallest value to the largest, or one around a single value.
        low, high = values.amin(), values.amax()
        single = low == high
        low, high = torch.where(single, low - 1, low), torch.where(single, high + 1, high)
    position = ((values - low) * bins / (high - low)).floor().long().clamp(0, bins - 1)
    inside = (values >= low) & (values <= high)
    counts = torch.zeros(bins, dtype=input.dtype, device=input.device)
    return counts.scatter_add(0, position, inside.to(input.dtype))


_LOWERINGS: tuple[tuple[Any, str, Callable[..., torch.Tensor]], ...] = (
    (torch, "_weight_norm", weight_norm),
    # The older torch.nn.utils.weight_norm holds the operator by its name (and torch hides that module by it).
    (sys.modules["torch.nn.utils.weight_norm"], "_weight_norm", weight_norm),
    (torch, "histc", histc),
)


def _on_device(original: Callable[..., Any], lowering: Callable[..., Any]) -> Callable[..., Any]:
    def chosen(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if "out" not in kwargs and get_backend().is_backend_tensor(tensor):
            return lowering(tensor, *args, **kwargs)
        return original(tensor, *args, **kwargs)

    return chosen


@contextmanager
def traced_lowerings() -> Iterator[None]:
    """Uses them for tensors on the XLA device, until the exit; others go to torch as before."""
    with ExitStack() as undo:
        for owner, name, lowering in _LOWERINGS:
            original = getattr(owner, name)
            undo.callback(setattr, owner, name, original)
            setattr(owner, name, _on_device(original, lowering))
        yield
