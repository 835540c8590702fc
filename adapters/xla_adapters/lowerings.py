"""Operators that torch_xla does not trace well, written in ones that it does.

Some it hands to the CPU in the middle of the step. `norm` it traces, but what it hashes for it differs
from one pass to the next (torch_xla 2.9: the graph is the same, its hash is not), which costs a
compile; `torch.linalg.vector_norm` is the same function without that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from xla_adapters.sharding.norms import batch_norm_statistics


def _norm(
    input: torch.Tensor,
    p: float | str | None = "fro",
    dim: int | list[int] | tuple[int, ...] | None = None,
    keepdim: bool = False,
    out: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """As `torch.norm` on the CPU, where torch does the same."""
    result: torch.Tensor
    if p == "nuc":
        result = torch.linalg.matrix_norm(input, p, (-2, -1) if dim is None else dim, keepdim, dtype=dtype, out=out)
    else:
        order = 2.0 if p is None or p == "fro" else p
        result = torch.linalg.vector_norm(input, order, dim, keepdim, dtype=dtype, out=out)
    return result


def _norm_except_dim(v: torch.Tensor, pow: int = 2, dim: int = 0) -> torch.Tensor:
    """As `torch.norm_except_dim`: of shape (1, ..., v.size(dim), ..., 1), or () for `dim=-1`."""
    others = None if dim == -1 else [other for other in range(v.ndim) if other != dim]
    result: torch.Tensor = torch.linalg.vector_norm(v, pow, others, keepdim=others is not None)
    return result


def _weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """As `torch._weight_norm`, in the form torch itself uses where it has no fused kernel."""
    return v * (g / _norm_except_dim(v, 2, dim))


def _normalize(
    input: torch.Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `torch.nn.functional.normalize`, which is a single call to whoever watches from outside."""
    length: torch.Tensor = torch.linalg.vector_norm(input, p, dim, keepdim=True).clamp_min(eps).expand_as(input)
    return torch.div(input, length, out=out) if out is not None else input / length


def _histc(input: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """As `torch.histc`: a scatter instead of a loop over values."""
    values = input.reshape(-1)
    low, high = torch.as_tensor(min, device=input.device), torch.as_tensor(max, device=input.device)
    if min == max:
        # Its way of saying: from the smallest value to the largest, or one around a single value.
        # (Not amin and amax: without a dimension torch_xla's reduce nothing.)
        low, high = values.min(), values.max()
        single = low == high
        low, high = torch.where(single, low - 1, low), torch.where(single, high + 1, high)
    position = ((values - low) * bins / (high - low)).floor().long().clamp(0, bins - 1)
    inside = (values >= low) & (values <= high)
    counts = torch.zeros(bins, dtype=input.dtype, device=input.device)
    return counts.scatter_add(0, position, inside.to(input.dtype))


def _sum(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As `torch.sum`: a scalar has a dimension to sum over (torch_xla 2.9: "Value out of range")."""
    if input.ndim == 0 and "out" not in kwargs:
        return torch.sum(input, dtype=kwargs.get("dtype"))
    return torch.sum(input, *args, **kwargs)


def _adaptive_average(function: Callable[..., Any], dims: int) -> Callable[..., torch.Tensor]:
    """As `adaptive_avg_pool1d` and its kin; torch_xla has it only for sizes that the output's divide."""

    def pool(input: torch.Tensor, output_size: int | Sequence[int | None]) -> torch.Tensor:
        asked = [output_size] * dims if isinstance(output_size, int) else list(output_size)
        present = input.shape[-dims:]
        sizes = [size if to is None else to for size, to in zip(present, asked, strict=True)]
        if input.device.type != "xla" or all(not to or size % to == 0 for size, to in zip(present, sizes, strict=True)):
            result: torch.Tensor = function(input, output_size)
            return result
        for dim, (size, to) in enumerate(zip(present, sizes, strict=True), input.ndim - dims):
            if size == 1:
                input = input.expand(*input.shape[:dim], to, *input.shape[dim + 1 :])
            elif size != to:
                starts, ends = ([(index * size + more) // to for index in range(to)] for more in (0, size + to - 1))
                windows = [input.narrow(dim, start, end - start) for start, end in zip(starts, ends, strict=True)]
                input = torch.cat([window.mean(dim, keepdim=True) for window in windows], dim)
        return input

    return pool


LOWERINGS: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {
    torch.norm: _norm,
    torch.Tensor.norm: _norm,
    torch.norm_except_dim: _norm_except_dim,
    torch._weight_norm: _weight_norm,
    torch.nn.functional.normalize: _normalize,
    torch.sum: _sum,
    torch.Tensor.sum: _sum,
    torch.adaptive_avg_pool1d: _adaptive_average(torch.adaptive_avg_pool1d, 1),
    torch.nn.functional.adaptive_avg_pool2d: _adaptive_average(torch.nn.functional.adaptive_avg_pool2d, 2),
    torch.nn.functional.adaptive_avg_pool3d: _adaptive_average(torch.nn.functional.adaptive_avg_pool3d, 3),
    torch.histc: _histc,
    torch.Tensor.histc: _histc,
}

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
    """Calls a normalisation; the running variance of a batch norm is updated as on other devices.

    torch keeps the unbiased variance of the batch (over n - 1), torch_xla 2.9 the biased one (over n): the
    same training, but another result in evaluation, by n / (n - 1) = 8 / 7 for 8 values per channel. What
    torch_xla computes for the backward pass holds both statistics, so the update costs no pass over the input.

    The momentum may be a tensor of no dimensions, see `cumulative_average`. `split` writes the norm as means,
    see `xla_adapters.sharding.norms`.
    """
    names = _ARGUMENTS.get(function)
    given = {**dict(zip(names, args, strict=False)), **kwargs} if names is not None else {}
    running_mean: torch.Tensor | None = given.get("running_mean")
    running_var: torch.Tensor | None = given.get("running_var")
    if running_mean is None or running_var is None or not given.get("training") or running_var.device.type != "xla":
        return function(*args, **kwargs)
    input: torch.Tensor = given["input"]
    values = input.numel() // input.shape[1]
    if values < 2:
        # Refused there.
        return function(*args, **kwargs)
    momentum: float | torch.Tensor = given.get("momentum", 0.1)
    eps: float = given.get("eps", 1e-5)
    weight, bias = given.get("weight"), given.get("bias")
    # torch_xla's own operation computes in the widest of these, and says that it returns the input's.
    autocast = torch.is_autocast_enabled("xla")
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
    """The momentum of a batch norm whose `momentum` is None, for its next batch; for any other module None.

    torch reads how many batches there have been (`float(num_batches_tracked)`); here it stays on the device.
    """
    if not isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
        return None
    batches = module.num_batches_tracked
    if module.momentum is not None or not module.training or batches is None or batches.device.type != "xla":
        return None
    with torch.no_grad():
        return 1 / (batches + 1).to(torch.get_default_dtype())
