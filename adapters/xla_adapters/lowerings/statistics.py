"""Functions of torch that look at values on the host before they compute, or that torch_xla does not have."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

_Tensor = torch.Tensor


def _cov(
    input: _Tensor, *, correction: int = 1, fweights: _Tensor | None = None, aweights: _Tensor | None = None
) -> _Tensor:
    """As `torch.cov`, which compares the number of observations on the device."""
    if fweights is not None or aweights is not None:
        return torch.cov(input, correction=correction, fweights=fweights, aweights=aweights)
    rows = input.reshape(1, -1) if input.ndim < 2 else input
    if not (rows.is_floating_point() or rows.is_complex()):
        rows = rows.to(torch.get_default_dtype())
    centred = rows - rows.mean(1, keepdim=True)
    observations = max(rows.shape[1] - correction, 0)
    products = centred @ centred.mH
    return (products / observations if observations else products * math.nan).squeeze()


def _corrcoef(input: _Tensor) -> _Tensor:
    covariance = _cov(input)
    if not covariance.ndim:
        return covariance / covariance
    deviations = covariance.diagonal().sqrt()
    return (covariance / deviations.unsqueeze(1) / deviations).clamp(-1, 1)


def _gaussian_nll_loss(
    input: _Tensor, target: _Tensor, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> _Tensor:
    """As torch's, without its look at the variances for a negative one."""
    if not isinstance(var, _Tensor) or reduction not in ("none", "mean", "sum"):
        return functional.gaussian_nll_loss(input, target, var, full, eps, reduction)
    if var.shape != input.shape:
        if input.shape[:-1] == var.shape:
            var = var.unsqueeze(-1)
        elif input.shape[:-1] != var.shape[:-1] or var.shape[-1] != 1:
            raise ValueError("var is of incorrect size")
    bounded = var + (var.clamp(min=eps) - var).detach()
    losses: _Tensor = 0.5 * (bounded.log() + (input - target) ** 2 / bounded)
    if full:
        losses = losses + 0.5 * math.log(2 * math.pi)
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()


def _combinations(input: _Tensor, r: int = 2, with_replacement: bool = False) -> _Tensor:
    """As `torch.combinations`, which selects by a mask."""
    if r != 2:
        return torch.combinations(input, r, with_replacement)
    first, second = torch.triu_indices(len(input), len(input), 0 if with_replacement else 1)
    return torch.stack([input[one.to(input.device)] for one in (first, second)], 1)


def _rrelu(
    input: _Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> _Tensor:
    slope: Any = (lower + upper) / 2
    if training:
        slope = torch.empty_like(input).uniform_(lower, upper)
    result = torch.where(input > 0, input, input * slope)
    return input.copy_(result) if inplace else result


STATISTICS: dict[Callable[..., Any], Callable[..., _Tensor]] = {
    torch.cov: _cov,
    _Tensor.cov: _cov,
    torch.corrcoef: _corrcoef,
    _Tensor.corrcoef: _corrcoef,
    torch.combinations: _combinations,
    functional.gaussian_nll_loss: _gaussian_nll_loss,
    functional.rrelu: _rrelu,
}
