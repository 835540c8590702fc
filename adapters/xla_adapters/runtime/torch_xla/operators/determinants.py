"""Logarithms of determinants, and singular values of several matrices.

torch_xla 2.9 gives no decomposition with the determinants, so that the backward fails, and the singular values of
several matrices in a wrong shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_Determinant = tuple[torch.Tensor, torch.Tensor]


class _LogDeterminant(torch.autograd.Function):
    """Sign and logarithm. The gradient of the logarithm is the transposed inverse, by singular values."""

    @staticmethod
    def forward(ctx: Any, matrices: torch.Tensor, stock: Callable[..., Any]) -> _Determinant:
        ctx.save_for_backward(matrices)
        sign, logarithm, *_ = stock(matrices)
        ctx.mark_non_differentiable(sign)
        return sign, logarithm

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (matrices,) = ctx.saved_tensors
        return gradients[1][..., None, None] * torch.linalg.pinv(matrices).mT, None


def _log_determinant(stock: Callable[..., Any], matrices: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`_linalg_slogdet`. Its last two results are for torch's own gradient, which is not used."""
    sign, logarithm = _LogDeterminant.apply(matrices, stock)  # type: ignore[no-untyped-call]
    return sign, logarithm, matrices.detach(), torch.zeros(matrices.shape[:-1], dtype=torch.int32, device=sign.device)


def _singular_values(
    stock: Callable[..., Any], matrices: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, ...]:
    """`_linalg_svd`, one matrix after the other."""
    if matrices.ndim == 2:
        found: tuple[torch.Tensor, ...] = stock(matrices, *args, **kwargs)
        return found
    leading = matrices.shape[:-2]
    flat = matrices.reshape(-1, *matrices.shape[-2:])
    each = [stock(torch.select_copy(flat, 0, place), *args, **kwargs) for place in range(flat.shape[0])]
    return tuple(torch.stack(parts).reshape(*leading, *parts[0].shape) for parts in zip(*each, strict=True))


# Their first argument is torch's kernel.
AROUND_STOCK: dict[str, Callable[..., Any]] = {"_linalg_slogdet": _log_determinant}
# The same, of torch_xla.
AROUND_STOCK_BELOW_AUTOGRAD: dict[str, Callable[..., Any]] = {"_linalg_svd": _singular_values}
