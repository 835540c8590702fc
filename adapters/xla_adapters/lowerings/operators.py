"""Operators that torch_xla does not trace well, written with operators that it does.

Some fall back to the CPU in the middle of the step. Some of torch's own Python looks at values before it computes.
`torch.norm` is traced, but its hash differs between two calls of a step (torch_xla 2.9; the graph is the same), which
costs a compile. `torch.linalg.vector_norm` has no such problem.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from xla_adapters.utils.torch_modes import device_type

_Tensor = torch.Tensor

# ---- norms, sums and products -----------------------------------------------------------------------


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


# ---- statistics -------------------------------------------------------------------------------------


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


# ---- complex numbers --------------------------------------------------------------------------------


def _abs(input: _Tensor) -> _Tensor:
    if not input.is_complex():
        return torch.abs(input)
    # Its gradient at 0 is 0, as torch's.
    size: _Tensor = torch.linalg.vector_norm(torch.view_as_real(input), dim=-1)
    return size


def _angle(input: _Tensor) -> _Tensor:
    if not input.is_complex():
        return torch.where(input < 0, torch.pi, torch.where(input.isnan(), input, 0.0)).to(input.dtype)
    real, imaginary = torch.view_as_real(input).unbind(-1)
    return torch.atan2(imaginary, real)


def _sign(input: _Tensor) -> _Tensor:
    if not input.is_complex():
        return torch.sgn(input)
    size = _abs(input)
    return input * torch.where(size == 0, size, size.reciprocal())


def _divide(input: Any, other: Any, **kwargs: Any) -> _Tensor:
    """As `torch.div`. torch_xla's quotient of complex numbers is real, and it rounds a divisor to 8-bit integers."""
    if not kwargs and not isinstance(other, _Tensor) and input.dtype in (torch.int8, torch.uint8):
        quotient: _Tensor = input.to(torch.get_default_dtype()) / other
        return quotient
    if kwargs or not any(isinstance(value, _Tensor) and value.is_complex() for value in (input, other)):
        return torch.div(input, other, **kwargs)
    product: _Tensor = input * (other.reciprocal() if isinstance(other, _Tensor) else 1 / other)
    return product


# ---- questions of torch's own Python about values, answered without a read --------------------------


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


# ---- matrix products of consecutive groups of rows, as mixtures of experts compute them -------------


def _grouped(
    input: torch.Tensor,
    mat2: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """As `torch._grouped_mm`. How many rows a group has is known on the device only."""
    if offs is None or input.ndim != 2 or mat2.ndim != 3:
        result: torch.Tensor = torch._grouped_mm(input, mat2, offs=offs, bias=bias, out_dtype=out_dtype)
        return result
    result = _product(input, mat2, offs)
    result = result if bias is None else result + bias
    return result if out_dtype is None else result.to(out_dtype)


def _product(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Every matrix is multiplied with every row, since the shapes of a graph are fixed.

    Args:
        input: (rows, in).
        weight: (groups, in, out).
        offs: (groups,), where each group ends. Rows behind the last one give zeros.
    """
    groups, rows = weight.shape[0], input.shape[0]
    group = torch.searchsorted(offs, torch.arange(rows, device=input.device, dtype=offs.dtype), right=True)
    in_group = group == torch.arange(groups, device=input.device).unsqueeze(-1)
    products = torch.bmm(input.expand(groups, *input.shape), weight)
    return torch.where(in_group.unsqueeze(-1), products, torch.zeros_like(products)).sum(0)


def grouped_products() -> dict[Callable[..., Any], Callable[..., torch.Tensor]]:
    """Lowerings of torch's operator, and of the one that transformers registers when it is imported."""
    found: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {torch._grouped_mm: _grouped}
    registered = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    return found if registered is None else {**found, registered: _product}


# ---- CTC without a read of how many labels there are ---------------------------------------------------


def ctc_of_padded_labels(
    logits: _Tensor,
    labels: _Tensor,
    logit_lengths: _Tensor,
    blank_token_id: int,
    reduction: str = "mean",
    zero_infinity: bool = False,
    ignore_index: int = -100,
    **kwargs: Any,
) -> _Tensor:
    """As `ForCTCLoss` of transformers, which selects the labels of all texts, a tensor of another length each time.

    Args:
        logits: (batch, frames, classes).
        labels: (batch, longest text); what is `ignore_index` or the blank does not count, wherever it stands.
        logit_lengths: (batch,), the frames of each text.
        blank_token_id: the class that stands for no label.
        reduction: `"mean"`, `"sum"` or `"none"`.
        zero_infinity: whether impossible texts count as zero.
        ignore_index: the label that does not count.
        kwargs: what else a model passes to its loss.
    """
    labels = labels.to(logits.device)
    counts = (labels != ignore_index) & (labels != blank_token_id)
    order = (~counts).long().argsort(dim=-1, stable=True)
    log_probs = functional.log_softmax(logits, dim=-1, dtype=torch.float32).transpose(0, 1)
    return functional.ctc_loss(
        log_probs,
        labels.gather(-1, order).clamp(min=0),
        logit_lengths,
        counts.sum(-1),
        blank=blank_token_id,
        reduction=reduction,
        zero_infinity=zero_infinity,
    )


# ---- writes to what a mask selects, without a read of how many elements that are --------------------


def is_write_by_mask(tensor: Any, index: Any, value: Any) -> bool:
    """Whether `tensor[index] = value` writes the same to each position of a mask.

    The index is a mask of the first dimensions, or has one mask among slices, integers and an ellipsis.
    """
    if not (isinstance(tensor, _Tensor) and tensor.device.type == device_type()):
        return False
    found = _mask_and_dims(tensor, index)
    if found is None:
        return False
    behind = found[2]
    return isinstance(value, (bool, int, float)) or (
        isinstance(value, _Tensor)
        and (value.ndim <= behind or value.shape[-behind - 1] == 1)
        and value.device == tensor.device
        and value.dtype == tensor.dtype
    )


def _mask_and_dims(tensor: _Tensor, index: Any) -> tuple[_Tensor, tuple[Any, ...], int] | None:
    """The mask in an index, the index with whole dimensions in its place, and how many dimensions are behind it."""
    parts = index if isinstance(index, tuple) else (index,)
    masks = [part for part in parts if isinstance(part, _Tensor)]
    if len(masks) != 1 or masks[0].dtype is not torch.bool or not masks[0].ndim:
        return None
    mask, at = masks[0], next(at for at, part in enumerate(parts) if isinstance(part, _Tensor))
    if not all(type(part) in (int, slice) or part is Ellipsis for part in (*parts[:at], *parts[at + 1 :])):
        return None
    named = sum(1 for part in parts if type(part) in (int, slice)) + mask.ndim
    missing = tensor.ndim - named
    if missing < 0 or sum(1 for part in parts if part is Ellipsis) > 1:
        return None
    if all(part is not Ellipsis for part in parts):
        parts = (*parts, Ellipsis)
    whole: list[Any] = []
    for part in parts:
        if part is Ellipsis:
            whole += [slice(None)] * missing
        elif isinstance(part, _Tensor):
            at = len(whole)
            whole += [slice(None)] * mask.ndim
        else:
            whole.append(part)
    if mask.shape != tensor.shape[at : at + mask.ndim]:
        return None
    behind = sum(1 for part in whole[at + mask.ndim :] if type(part) is slice)
    return mask, tuple(whole), behind


def write_where_(tensor: _Tensor, index: Any, value: Any) -> None:
    """As `tensor[index] = value`, for what `is_write_by_mask` accepts."""
    found = _mask_and_dims(tensor, index)
    assert found is not None
    mask, whole, behind = found
    target = tensor if all(part == slice(None) for part in whole) else tensor[whole]
    wide = mask.to(tensor.device).reshape(*mask.shape, *[1] * behind)
    if isinstance(value, _Tensor) and value.ndim:
        if value.ndim > behind:
            # One dimension stands for what the mask selects; the mask has `mask.ndim` in its place.
            value = value.reshape(
                *value.shape[: value.ndim - behind - 1], *[1] * mask.ndim, *value.shape[value.ndim - behind :]
            )
        target.copy_(torch.where(wide, value, target))
    else:
        target.masked_fill_(wide, value)


def write_by_mask(
    input: _Tensor, indices: list[Any] | tuple[Any, ...], values: Any, accumulate: bool = False
) -> _Tensor:
    """As `torch.index_put`."""
    if len(indices) != 1 or not _is_by_first_dims(input, indices[0], values):
        return torch.index_put(input, indices, values, accumulate)
    return torch.where(_widened(indices[0], input), input + values if accumulate else values, input)


def write_by_mask_(
    input: _Tensor, indices: list[Any] | tuple[Any, ...], values: Any, accumulate: bool = False
) -> _Tensor:
    """As `Tensor.index_put_`."""
    if len(indices) != 1 or not _is_by_first_dims(input, indices[0], values):
        return input.index_put_(indices, values, accumulate)
    if accumulate or (isinstance(values, _Tensor) and values.ndim):
        return input.copy_(write_by_mask(input, indices, values, accumulate))
    return input.masked_fill_(_widened(indices[0], input), values)


def _is_by_first_dims(input: Any, mask: Any, values: Any) -> bool:
    is_mask = isinstance(mask, _Tensor) and is_write_by_mask(input, mask, values)
    return is_mask and (not isinstance(values, _Tensor) or values.ndim <= input.ndim - mask.ndim)


def _widened(mask: _Tensor, input: _Tensor) -> _Tensor:
    return mask.to(input.device).reshape(*mask.shape, *[1] * (input.ndim - mask.ndim))


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
    torch.cov: _cov,
    _Tensor.cov: _cov,
    torch.corrcoef: _corrcoef,
    _Tensor.corrcoef: _corrcoef,
    torch.combinations: _combinations,
    functional.gaussian_nll_loss: _gaussian_nll_loss,
    functional.rrelu: _rrelu,
    **dict.fromkeys((torch.abs, _Tensor.abs, _Tensor.__abs__, torch.absolute, _Tensor.absolute), _abs),
    **dict.fromkeys((torch.angle, _Tensor.angle), _angle),
    **dict.fromkeys((torch.sgn, _Tensor.sgn), _sign),
    **dict.fromkeys((torch.div, _Tensor.div, _Tensor.__truediv__, torch.true_divide, _Tensor.true_divide), _divide),
    torch._is_all_true: _is_all_true,
    torch._nested_tensor_from_mask_left_aligned: _is_left_aligned,
}
