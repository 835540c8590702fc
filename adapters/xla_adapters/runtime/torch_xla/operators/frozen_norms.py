"""Batch norm in eval mode under gradients, for which torch_xla 2.9 has no backward, and in training.

There torch_xla updates the running variance with the biased one of the batch. `_native_batch_norm_legit` is the
operator that graphs which were captured by torch have for batch norms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _batch_norm(
    stock: Callable[..., _Tensors],
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> _Tensors:
    """`native_batch_norm`, written with operators that have a backward."""
    if running_mean is None or running_var is None:
        return stock(input, weight, bias, running_mean, running_var, training, momentum, eps)
    if training:
        return _legit(input, weight, bias, running_mean, running_var, training, momentum, eps)
    if not torch.is_grad_enabled():
        return stock(input, weight, bias, running_mean, running_var, training, momentum, eps)
    return _frozen(input, weight, bias, running_mean, running_var, momentum, eps)


def _frozen(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
    eps: float,
) -> _Tensors:
    """With these statistics; also `_native_batch_norm_legit_no_training`, for which `momentum` is nothing either."""
    shape = [-1] + [1] * (input.ndim - 2)
    factor = (running_var + eps).rsqrt()
    if weight is not None:
        factor = factor * weight
    result = (input - running_mean.reshape(shape)) * factor.reshape(shape)
    if bias is not None:
        result = result + bias.reshape(shape)
    nothing = input.new_empty(0)
    return result.to(input.dtype), nothing, nothing


def _legit(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> _Tensors:
    """`_native_batch_norm_legit`, which torch_xla computes with the biased variance."""
    if not training:
        return _frozen(input, weight, bias, running_mean, running_var, momentum, eps)
    result, mean, inverse = torch.native_batch_norm(input, weight, bias, None, None, True, 0.0, eps)
    values = input.numel() // input.shape[1]
    with torch.no_grad():
        variance = (inverse.pow(-2) - eps) * (values / max(values - 1, 1))
        running_mean.mul_(1 - momentum).add_(mean * momentum)
        running_var.mul_(1 - momentum).add_(variance * momentum)
    return result, mean, inverse


KERNELS: dict[str, Callable[..., _Tensors]] = {
    "_native_batch_norm_legit": _legit,
    "_native_batch_norm_legit_no_training": _frozen,
}
# Kernels whose first argument is torch's own.
AROUND_STOCK: dict[str, Callable[..., Any]] = {"native_batch_norm": _batch_norm}
