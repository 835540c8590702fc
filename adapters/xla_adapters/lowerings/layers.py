"""Normalisations and attention: such that they stay sharded under SPMD, and running variances as torch has them.

torch_xla 2.9 lowers layer norm to HLO's batch-norm operation, for which the partitioner gathers the whole activation on
every device, twice per norm: half of the communication volume of a data-parallel GPT-2. Written with means, a norm
needs one small all-reduce, or none.

It merges batch and heads into one dimension for batched matrix products. The partitioner can split that over one mesh
axis only, so on a mesh of two axes it gathers queries, keys and values. An einsum keeps the two apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from xla_adapters.utils.torch_modes import device_type


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


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """As torch's function of this name, for tensors of 4 dimensions; others are passed on to torch."""
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4 or query.shape[0] != key.shape[0]:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    dtype = query.dtype
    if dtype in (torch.bfloat16, torch.float16):
        # As torch computes it without a fused kernel.
        query, key, value = query.float(), key.float(), value.float()
    scores = torch.einsum("bhid,bhjd->bhij", query, key) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is None:
        weights = torch.softmax(scores, -1)
    else:
        masks = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if masks else scores + attn_mask
        # A query for which everything is masked gives zeros, as in torch, instead of NaN.
        blind = (scores == -math.inf).all(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(blind, 0), -1).masked_fill(blind, 0)
    if dropout_p:
        weights = functional.dropout(weights, dropout_p)
    return torch.einsum("bhij,bhjd->bhid", weights, value).to(dtype)


NORMS: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {
    functional.layer_norm: layer_norm,
    torch.layer_norm: layer_norm,
    functional.group_norm: group_norm,
    torch.group_norm: group_norm,
}


ATTENTION: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {
    functional.scaled_dot_product_attention: scaled_dot_product_attention,
}


# ---- batch norms with running statistics ------------------------------------------------------------


_ARGUMENTS: dict[Callable[..., Any], tuple[str, ...]] = {
    torch.nn.functional.batch_norm: (
        "input",
        "running_mean",
        "running_var",
        "weight",
        "bias",
        "training",
        "momentum",
        "eps",
    ),
    torch.batch_norm: (
        "input",
        "weight",
        "bias",
        "running_mean",
        "running_var",
        "training",
        "momentum",
        "eps",
        "cudnn_enabled",
    ),
}


def norm_with_torchs_variance(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, split: bool = False
) -> Any:
    """Calls a normalisation, and updates the running variance of a batch norm as on other devices.

    torch updates with the unbiased variance of the batch (over n - 1), torch_xla 2.9 with the biased one (over n).
    Training is the same, but evaluation differs, by n / (n - 1) = 8 / 7 for 8 values per channel. The statistics come
    from what torch_xla saves for the backward, so they are not computed twice.

    Args:
        function: the normalisation; any but a batch norm in training is just called.
        args, kwargs: its arguments; `momentum` may be a 0-dimensional tensor, see `cumulative_average`.
        split: writes the norm with means, see `xla_adapters.lowerings.layers`.
    """
    names = _ARGUMENTS.get(function)
    given = {**dict(zip(names, args, strict=False)), **kwargs} if names is not None else {}
    running_mean: torch.Tensor | None = given.get("running_mean")
    running_var: torch.Tensor | None = given.get("running_var")
    if (
        running_mean is None
        or running_var is None
        or not given.get("training")
        or running_var.device.type != device_type()
    ):
        return function(*args, **kwargs)
    input: torch.Tensor = given["input"]
    values = input.numel() // input.shape[1]
    if values < 2:
        # torch raises for this.
        return function(*args, **kwargs)
    momentum: float | torch.Tensor = given.get("momentum", 0.1)
    eps: float = given.get("eps", 1e-5)
    weight, bias = given.get("weight"), given.get("bias")
    # torch_xla's operation computes in the widest of these dtypes, but declares the input's for its result.
    autocast = torch.is_autocast_enabled(device_type())
    wide = torch.float32 if autocast else input.dtype
    for tensor in (input, weight, bias):
        wide = wide if tensor is None else torch.promote_types(wide, tensor.dtype)
    narrow, input = input.dtype, input.to(wide)
    weight, bias = (tensor if tensor is None else tensor.to(wide) for tensor in (weight, bias))
    if split:
        result, mean, biased = batch_norm_statistics(input, weight, bias, eps)
    else:
        result, mean, inverse_deviation = torch.native_batch_norm(input, weight, bias, None, None, True, 0.0, eps)
        biased = inverse_deviation.detach().to(running_var.dtype).pow(-2) - eps
    with torch.no_grad():
        variance = biased * (values / (values - 1))
        running_mean.mul_(1 - momentum).add_(mean * momentum)
        running_var.mul_(1 - momentum).add_(variance * momentum)
    return result if autocast else result.to(narrow)


def cumulative_average(module: torch.nn.Module) -> torch.Tensor | None:
    """The momentum for the next batch of a batch norm with `momentum=None`; None for any other module.

    torch reads the number of batches on the host (`float(num_batches_tracked)`); here it stays on the device.

    Returns:
        A tensor of no dimensions, 1 / (batches + 1).
    """
    if not isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
        return None
    batches = module.num_batches_tracked
    if module.momentum is not None or not (module.training and module.track_running_stats):
        return None
    if batches is None or batches.device.type != device_type():
        return None
    with torch.no_grad():
        return 1 / (batches + 1).to(torch.get_default_dtype())
