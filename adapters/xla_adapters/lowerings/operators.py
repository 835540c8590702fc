"""Operators that torch_xla does not trace well, written with operators that it does.

Some fall back to the CPU in the middle of the step. `torch.norm` is traced, but its hash differs between two calls of a
step (torch_xla 2.9; the graph is the same), which costs a compile. `torch.linalg.vector_norm` has no such problem.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xla_adapters.lowerings.checks import CHECKS
from xla_adapters.lowerings.complex_numbers import COMPLEX
from xla_adapters.lowerings.masks import write_by_mask, write_by_mask_
from xla_adapters.lowerings.norms import batch_norm_statistics
from xla_adapters.lowerings.statistics import STATISTICS
from xla_adapters.utils.torch_modes import device_type


def _norm(
    input: torch.Tensor,
    p: float | str | None = "fro",
    dim: int | list[int] | tuple[int, ...] | None = None,
    keepdim: bool = False,
    out: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """As `torch.norm`, which does the same on the CPU."""
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
    """As `torch._weight_norm`, in the form that torch uses without a fused kernel."""
    return v * (g / _norm_except_dim(v, 2, dim))


def _normalize(
    input: torch.Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `torch.nn.functional.normalize`; a function mode sees that as one call, and not the `norm` inside."""
    length: torch.Tensor = torch.linalg.vector_norm(input, p, dim, keepdim=True).clamp_min(eps).expand_as(input)
    return torch.div(input, length, out=out) if out is not None else input / length


def _histc(input: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """As `torch.histc`, as a scatter."""
    values = input.reshape(-1)
    low, high = torch.as_tensor(min, device=input.device), torch.as_tensor(max, device=input.device)
    if min == max:
        # Equal limits mean the range of the values, widened by 1 if all are equal.
        low, high = values.min(), values.max()
        single = low == high
        low, high = torch.where(single, low - 1, low), torch.where(single, high + 1, high)
    position = ((values - low) * bins / (high - low)).floor().long().clamp(0, bins - 1)
    inside = (values >= low) & (values <= high)
    counts = torch.zeros(bins, dtype=input.dtype, device=input.device)
    return counts.scatter_add(0, position, inside.to(input.dtype))


def _addmm(
    input: torch.Tensor,
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `torch.addmm`, also with factors."""
    if (beta, alpha) == (1, 1) or out is not None:
        return torch.addmm(input, mat1, mat2, beta=beta, alpha=alpha, out=out)
    product = torch.mm(mat1, mat2) * alpha
    # With a factor of zero, what the input has that is not finite does not count.
    return product + input * beta if beta else product


def _addmm_(
    input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """As `Tensor.addmm_`."""
    return input.copy_(_addmm(input, mat1, mat2, beta=beta, alpha=alpha))


def _summing(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """As a sum of torch's, also of all dimensions, for `dim=()`, or of none (torch_xla 2.9: "Value out of range").

    No kernel: that of sums belongs to the device (`xla_adapters.cpu`), or to the user.
    """

    def summed(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if input.ndim == 0 and "out" not in kwargs:
            return function(input, dtype=kwargs.get("dtype"))
        if args and _is_empty(args[0]):
            args = (list(range(input.ndim)), *args[1:])
        for name in ("dim", "axis"):
            if _is_empty(kwargs.get(name)):
                kwargs = {**kwargs, name: list(range(input.ndim))}
        return function(input, *args, **kwargs)

    return summed


def _is_empty(dims: Any) -> bool:
    return isinstance(dims, (tuple, list)) and not dims


LOWERINGS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.norm: _norm,
    torch.Tensor.norm: _norm,
    torch.norm_except_dim: _norm_except_dim,
    torch._weight_norm: _weight_norm,
    torch.nn.functional.normalize: _normalize,
    **dict.fromkeys((torch.sum, torch.Tensor.sum), _summing(torch.sum)),
    **dict.fromkeys((torch.nansum, torch.Tensor.nansum), _summing(torch.nansum)),
    **dict.fromkeys((torch.nanmean, torch.Tensor.nanmean), _summing(torch.nanmean)),
    torch.addmm: _addmm,
    torch.Tensor.addmm: _addmm,
    torch.Tensor.addmm_: _addmm_,
    torch.index_put: write_by_mask,
    torch.Tensor.index_put: write_by_mask,
    torch.Tensor.index_put_: write_by_mask_,
    torch.histc: _histc,
    torch.Tensor.histc: _histc,
    **STATISTICS,
    **COMPLEX,
    **CHECKS,
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
    """Calls a normalisation, and updates the running variance of a batch norm as on other devices.

    torch updates with the unbiased variance of the batch (over n - 1), torch_xla 2.9 with the biased one (over n).
    Training is the same, but evaluation differs, by n / (n - 1) = 8 / 7 for 8 values per channel. The statistics come
    from what torch_xla saves for the backward, so they are not computed twice.

    Args:
        function: the normalisation; any but a batch norm in training is just called.
        args, kwargs: its arguments; `momentum` may be a 0-dimensional tensor, see `cumulative_average`.
        split: writes the norm with means, see `xla_adapters.lowerings.norms`.
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
    if module.momentum is not None or not module.training or batches is None or batches.device.type != device_type():
        return None
    with torch.no_grad():
        return 1 / (batches + 1).to(torch.get_default_dtype())
