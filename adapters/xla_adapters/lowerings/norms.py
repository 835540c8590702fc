"""Normalisations that stay sharded under SPMD.

torch_xla 2.9 lowers layer norm to HLO's batch-norm operation, for which the partitioner gathers the whole activation on
every device, twice per norm: half of the communication volume of a data-parallel GPT-2. Written with means, a norm
needs one small all-reduce, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional


def _result_type(input: torch.Tensor) -> torch.dtype:
    """The result type of torch's norms: float32 under autocast."""
    return torch.float32 if torch.is_autocast_enabled(input.device.type) else input.dtype


def _standardized(input: torch.Tensor, dims: list[int], eps: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values = input.float() if input.dtype in (torch.bfloat16, torch.float16) else input
    mean = values.mean(dims, keepdim=True)
    centered = values - mean
    variance = (centered * centered).mean(dims, keepdim=True)
    return centered * torch.rsqrt(variance + eps), mean, variance


def layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> torch.Tensor:
    """As `torch.nn.functional.layer_norm`."""
    result, _, _ = _standardized(input, list(range(-len(normalized_shape), 0)), eps)
    if weight is not None:
        result = result * weight
    if bias is not None:
        result = result + bias
    return result.to(_result_type(input))


def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> torch.Tensor:
    """As `torch.nn.functional.group_norm`."""
    grouped = input.reshape(input.shape[0], num_groups, -1)
    result = _standardized(grouped, [-1], eps)[0].reshape(input.shape)
    channels = [1, -1] + [1] * (input.ndim - 2)
    if weight is not None:
        result = result * weight.reshape(channels)
    if bias is not None:
        result = result + bias.reshape(channels)
    return result.to(_result_type(input))


def batch_norm_statistics(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Batch norm with batch statistics.

    Returns:
        The normalised batch, and its mean and biased variance per channel (detached, of shape (channels,)).
    """
    dims = [index for index in range(input.ndim) if index != 1]
    result, mean, variance = _standardized(input, dims, eps)
    channels = [1, -1] + [1] * (input.ndim - 2)
    if weight is not None:
        result = result * weight.reshape(channels)
    if bias is not None:
        result = result + bias.reshape(channels)
    return result.to(input.dtype), mean.detach().reshape(-1), variance.detach().reshape(-1)


NORMS: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {
    functional.layer_norm: layer_norm,
    torch.layer_norm: layer_norm,
    functional.group_norm: group_norm,
    torch.group_norm: group_norm,
}
