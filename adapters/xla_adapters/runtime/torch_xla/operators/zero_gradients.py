"""`with_zero_gradient`: for results that do not depend on an argument, but whose gradient torch says is zero."""

from __future__ import annotations

from typing import Any

import torch


class _Unaffected(torch.autograd.Function):
    """The result, with an argument that it does not depend on."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, argument: torch.Tensor) -> torch.Tensor:
        ctx.shape, ctx.dtype = argument.shape, argument.dtype
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradients[0], gradients[0].new_zeros(ctx.shape, dtype=ctx.dtype)


def with_zero_gradient(result: torch.Tensor, argument: torch.Tensor) -> torch.Tensor:
    """The result; the argument gets a gradient of zero from it, if it has none from what the result was computed of."""
    if not argument.requires_grad:
        return result
    found: torch.Tensor = _Unaffected.apply(result, argument)  # type: ignore[no-untyped-call]
    return found
