"""Reductions, sorts and softmax along dimensions, of NaN and infinities, and of tensors without dimensions.

What torch_xla 2.9 does otherwise:
- It refuses tensors of no dimensions or of no elements ("Value out of range"). torch takes a tensor of no dimensions
  for one of a single dimension with one element.
- A reduction over `dim=()` is one over all dimensions, where torch_xla returns the values as they are.
- torch's extreme of values with NaN is NaN, and stands where the first NaN does. torch_xla's maximum of minus
  infinities is the lowest number.
- It computes medians on the host, by sorting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._decomp import decomposition_table

from xla_adapters.runtime.torch_xla.operators.registration import Kernels

_Stock = Callable[..., Any]
_ALONG_A_DIMENSION = (
    *("prod.dim_int", "topk", "kthvalue", "sort", "sort.stable"),
    *("any.dim", "any.dims", "all.dim", "all.dims", "flip", "_softmax", "_log_softmax"),
)
# `sum`, which has a kernel for CPU devices, is lowered in steps; see `xla_adapters.lowerings`.
_REDUCTIONS = ("std.correction", "var.correction", "std_mean.correction", "var_mean.correction")
_Found = tuple[torch.Tensor, torch.Tensor]
# What the extreme of no values is.
_OF_NOTHING = {"max": -math.inf, "min": math.inf}
_Both = tuple[torch.Tensor, torch.Tensor]


# ---- along dimensions -----------------------------------------------------------------------------


def with_a_dimension(stock: _Stock, self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Along a dimension; of a tensor without one, the results have none either."""
    if self.ndim:
        return stock(self, *args, **kwargs)
    results = stock(self.reshape(1), *args, **kwargs)
    return results.reshape(()) if isinstance(results, torch.Tensor) else tuple(one.reshape(()) for one in results)


def _reduced(stock: _Stock, self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Along dimensions, which are the first of the other arguments; all if there are none."""
    if not self.ndim:
        return with_a_dimension(stock, self, *args, **kwargs)
    if args and args[0] is not None and not args[0]:
        args = (list(range(self.ndim)), *args[1:])
    return stock(self, *args, **kwargs)


def _vector_norm(stock: _Stock, self: torch.Tensor, ord: float = 2, *args: Any, **kwargs: Any) -> Any:
    """`linalg_vector_norm`."""
    return _reduced(lambda values, *rest, **others: stock(values, ord, *rest, **others), self, *args, **kwargs)


def _backward_with_a_dimension(
    stock: _Stock, grad_output: torch.Tensor, output: torch.Tensor, *args: Any
) -> torch.Tensor:
    """Of `softmax` and `log_softmax`."""
    if output.ndim:
        result: torch.Tensor = stock(grad_output, output, *args)
        return result
    one: torch.Tensor = stock(grad_output.reshape(1), output.reshape(1), *args)
    return one.reshape(())


def _cumulative(stock: _Stock, self: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`cumsum` and `cumprod`, in a dtype that holds the sums: torch_xla's own adds up in that of the input."""
    whole = not (self.is_floating_point() or self.is_complex())
    dtype = dtype or (torch.int64 if whole else self.dtype)
    if self.numel() == 0:
        return torch.zeros_like(self, dtype=dtype)
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    result: torch.Tensor = with_a_dimension(stock, self.to(wide), dim, dtype=wide)
    return result.to(dtype)


def _sum_of_numbers(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`nansum`: torch's own decomposition, which asks also integers whether they are NaN."""
    decomposed = decomposition_table[torch.ops.aten.nansum.default] if self.is_floating_point() else torch.sum
    result: torch.Tensor = with_a_dimension(decomposed, self, *args, **kwargs)
    return result


def _one_loss(stock: _Stock, self: torch.Tensor, target: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`nll_loss_forward`: of a single sample without a batch, torch_xla's own ends the process."""
    if self.ndim > 1:
        return _loss_of_classes(stock, self, target, *args)
    _refuse_unless_integers(target)
    loss, weight = stock(self.reshape(1, -1), target.reshape(1), *args)
    return loss.reshape(()), weight


def _loss_of_classes(
    stock: _Stock, self: torch.Tensor, target: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """`nll_loss2d_forward`: torch_xla's own rounds classes that are no integers, where torch raises."""
    _refuse_unless_integers(target)
    found: tuple[torch.Tensor, torch.Tensor] = stock(self, target, *args)
    return found


def _refuse_unless_integers(target: torch.Tensor) -> None:
    if target.is_floating_point() or target.is_complex() or target.dtype is torch.bool:
        raise RuntimeError(
            f"expected class labels of the dtype torch.int64, but found {target.dtype}: use labels.long()"
        )


def _one_loss_backward(
    stock: _Stock,
    grad_output: torch.Tensor,
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    *args: Any,
) -> torch.Tensor:
    if self.ndim > 1:
        result: torch.Tensor = stock(grad_output, self, target, weight, reduction, *args)
        return result
    gradient = grad_output if reduction else grad_output.reshape(1)
    one: torch.Tensor = stock(gradient, self.reshape(1, -1), target.reshape(1), weight, reduction, *args)
    return one.reshape(self.shape)


def _mean(
    stock: Callable[..., torch.Tensor], self: torch.Tensor, *args: Any, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Of integers, too."""
    return stock(self if dtype is None else self.to(dtype), *args, dtype=dtype)


def _mean_along(stock: Callable[..., torch.Tensor], self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    result: torch.Tensor = _reduced(partial(_mean, stock), self, *args, **options)
    return result


def _count_nonzero(self: torch.Tensor, dim: int | Sequence[int] | None = None) -> torch.Tensor:
    """As 64-bit integers, where torch_xla counts in the dtype of the values."""
    nonzero = self != 0
    if dim is None or not self.ndim:
        return nonzero.sum()
    return nonzero.sum(dim if isinstance(dim, int) else list(dim))


# ---- extremes -------------------------------------------------------------------------------------


def _extreme(
    stock: Callable[..., torch.Tensor], input: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False
) -> torch.Tensor:
    """`amax` and `amin`."""
    if input.ndim == 0:
        return stock(input.reshape(1), [0], False)
    return stock(input, list(dim) or list(range(input.ndim)), keepdim)


def _extreme_value(
    none: float,
    stock: Callable[..., torch.Tensor],
    input: torch.Tensor,
    dim: Sequence[int] = (),
    keepdim: bool = False,
) -> torch.Tensor:
    """`amax` and `amin` below autograd, whose gradient compares with the result."""
    values = _extreme(stock, input, dim, keepdim)
    if not (input.is_floating_point() and input.ndim):
        return values
    return _or_infinite(none, values, (input == none).all(list(dim) or list(range(input.ndim)), keepdim))


def _extreme_of_all(none: float, stock: Callable[..., torch.Tensor], input: torch.Tensor) -> torch.Tensor:
    """`max` and `min`."""
    values = stock(input)
    return _or_infinite(none, values, (input == none).all()) if input.is_floating_point() else values


def _or_infinite(none: float, values: torch.Tensor, all_are: torch.Tensor) -> torch.Tensor:
    return torch.where(all_are, torch.full_like(values, none), values)


def _place(
    stock: Callable[..., torch.Tensor], self: torch.Tensor, dim: int | None = None, keepdim: bool = False
) -> torch.Tensor:
    """`argmax` and `argmin`."""
    if self.is_complex():
        # torch_xla's own ends the process.
        raise NotImplementedError("the largest and the smallest of complex numbers are not defined")
    if not (self.numel() if dim is None or not self.ndim else self.shape[dim]):
        raise IndexError("argmax() and argmin() of no values: there is no place to tell")
    if not self.ndim:
        return torch.zeros((), dtype=torch.int64, device=self.device)
    place = stock(self, dim, keepdim)
    if not self.is_floating_point():
        return place
    nans = self.isnan()
    found = nans.any() if dim is None else nans.any(dim, keepdim)
    return torch.where(found, torch.argmax(nans.to(torch.int32), dim, keepdim), place)


def _extreme_along(
    none: float, stock: Callable[..., _Found], self: torch.Tensor, dim: int, keepdim: bool = False
) -> _Found:
    """`max.dim` and `min.dim`."""
    if not self.ndim:
        return self.clone(), torch.zeros((), dtype=torch.int64, device=self.device)
    values, places = stock(self, dim, keepdim)
    if not self.is_floating_point():
        return values, places
    nans = self.isnan()
    found = nans.any(dim, keepdim)
    places = torch.where(found, torch.argmax(nans.to(torch.int32), dim, keepdim), places)
    values = _or_infinite(none, values, (self == none).all(dim, keepdim))
    return torch.where(found, torch.full_like(values, torch.nan), values), places


def _cumulative_maximum(stock: Callable[..., _Found], self: torch.Tensor, dim: int) -> _Found:
    """`cummax`. torch_xla's own places are of another dtype than they say, and cannot be converted."""
    if not self.ndim:
        value, place = _cumulative_maximum(stock, self.reshape(1), 0)
        return value.reshape(()), place.reshape(())
    values = stock(self, dim)[0]
    if self.is_floating_point():
        found = stock(self.isnan().to(torch.int32), dim)[0] > 0
        values = torch.where(found, torch.full_like(values, torch.nan), values)
    shape = [1] * self.ndim
    shape[dim] = -1
    places = torch.arange(self.shape[dim], device=self.device, dtype=torch.int32).reshape(shape)
    # The last place that has the largest value so far, or none.
    has_it = (self == values) | (self != self)
    last = stock(torch.where(has_it, places, torch.zeros_like(places)), dim)[0]
    return values, last.to(torch.int64)


def _cumulative_minimum(self: torch.Tensor, dim: int) -> _Found:
    """Of what is ordered the other way round, the maximum."""
    if self.dtype is torch.bool:
        values, places = _cumulative_minimum(self.to(torch.int32), dim)
        return values != 0, places
    if self.is_floating_point():
        values, places = torch.cummax(-self, dim)
        return -values, places
    values, places = torch.cummax(~self, dim)
    return ~values, places


def _norm(
    self: torch.Tensor,
    p: float | None = None,
    dim: Sequence[int] = (),
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`norm`, of which torch_xla's own gives 1 for an infinite order."""
    result: torch.Tensor = torch.linalg.vector_norm(
        self, 2 if p is None else p, list(dim) or None, keepdim, dtype=dtype
    )
    return result


# ---- logarithms of sums ---------------------------------------------------------------------------


def _log_sum_exp(self: torch.Tensor, dim: list[int], keepdim: bool = False) -> torch.Tensor:
    """`logsumexp`, also of infinities."""
    whole = not (self.is_floating_point() or self.is_complex())
    values = self.to(torch.get_default_dtype()) if whole else self
    if not self.ndim:
        return values.clone()
    dims = list(dim) or list(range(self.ndim))
    if any(self.shape[one] == 0 for one in dims):
        return values.exp().sum(dims, keepdim).log()
    largest = (torch.view_as_real_copy(values).select(-1, 0) if self.is_complex() else values).amax(dims, keepdim=True)
    largest = torch.where(largest.abs() == math.inf, torch.zeros_like(largest), largest)
    total = (values - largest).exp().sum(dims, keepdim).log()
    return total + (largest if keepdim else largest.reshape(total.shape))


def _log_cumulative_sum_exp(self: torch.Tensor, dim: int) -> torch.Tensor:
    """Adds a copy that is shifted by 1, 2, 4, ..."""
    if self.ndim == 0:
        return self.clone()
    totals = self.float() if self.dtype.itemsize < 4 else self
    length, shift = self.shape[dim], 1
    while shift < length:
        before = totals.narrow(dim, 0, length - shift)
        nothing = torch.full_like(totals.narrow(dim, 0, shift), -torch.inf)
        totals = _log_add_exp(totals, torch.cat([nothing, before], dim))
        shift *= 2
    return totals.to(self.dtype)


def _log_add_exp(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """As torch's, with gradients of 0 where both are minus infinity, not NaN."""
    largest = torch.maximum(one, other).detach()
    largest = torch.where(largest.isinf(), 0.0, largest)
    total = (one - largest).exp() + (other - largest).exp()
    nothing = total == 0
    return torch.where(nothing, -torch.inf, torch.where(nothing, 1.0, total).log() + largest)


# ---- medians --------------------------------------------------------------------------------------


def _sorted_last(self: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Along the last dimension: the sorted values, their places, and which values are no numbers."""
    rows = self.movedim(dim, -1) if self.ndim else self.reshape(1)
    values, places = torch.sort(rows, dim=-1, stable=True)
    return values, places, rows.isnan()


def _chosen(self: torch.Tensor, dim: int, keepdim: bool, values: torch.Tensor, places: torch.Tensor) -> _Both:
    if not self.ndim:
        return values.reshape(()), places.reshape(())
    both = (one.movedim(-1, dim) for one in (values, places))
    first, second = both if keepdim else (one.squeeze(dim) for one in both)
    return first.clone(), second.clone()


def _of_nothing(self: torch.Tensor, dim: int, keepdim: bool) -> _Both:
    """No medians, where there are no rows."""
    if not self.shape[dim]:
        raise IndexError(f"a median of no values, along dimension {dim} of shape {tuple(self.shape)}")
    values = self.sum(dim, keepdim)
    return values.to(self.dtype), torch.zeros(values.shape, dtype=torch.int64, device=self.device)


def _median_along(self: torch.Tensor, dim: int, keepdim: bool = False) -> _Both:
    """The lower one of two; NaN where there is one."""
    if not self.numel():
        return _of_nothing(self, dim, keepdim)
    values, places, nans = _sorted_last(self, dim)
    middle = (values.shape[-1] - 1) // 2
    value, place = values.narrow(-1, middle, 1), places.narrow(-1, middle, 1)
    if self.is_floating_point():
        any_nan = nans.any(-1, keepdim=True)
        value = torch.where(any_nan, torch.full_like(value, torch.nan), value)
        place = torch.where(any_nan, nans.long().argmax(-1, keepdim=True), place)
    return _chosen(self, dim, keepdim, value, place)


def _median_of_numbers_along(self: torch.Tensor, dim: int, keepdim: bool = False) -> _Both:
    """Leaves out what is no number, which is sorted to the end."""
    if not self.numel():
        return _of_nothing(self, dim, keepdim)
    values, places, nans = _sorted_last(self, dim)
    middle = ((~nans).sum(-1, keepdim=True) - 1).clamp(min=0) // 2
    return _chosen(self, dim, keepdim, values.gather(-1, middle), places.gather(-1, middle))


def _over_all(median: Callable[[torch.Tensor, int], _Both]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Of all values. The gradient is distributed over those that are equal to the median, as torch does."""

    def kernel(self: torch.Tensor) -> torch.Tensor:
        flat = self.reshape(-1)
        if not flat.numel():
            return torch.full((), torch.nan if self.is_floating_point() else 0, dtype=self.dtype, device=self.device)
        value = median(flat.detach(), 0)[0]
        if not self.requires_grad:
            return value
        equal = (flat == value) | (flat.isnan() & value.isnan())
        spread = torch.where(equal, flat, torch.zeros_like(flat)).sum() / equal.sum()
        # The value itself, without what adding and dividing round.
        return value + (spread - spread.detach()) if spread.requires_grad else value

    return kernel


KERNELS = Kernels(
    differentiable={
        "median": _over_all(_median_along),
        "nanmedian": _over_all(_median_of_numbers_along),
        # Written with operators that have a backward.
        "logcumsumexp": _log_cumulative_sum_exp,
    },
    around_above_autograd={
        # The same, of torch's: above them.
        "amax": _extreme,
        # The same, of torch's: above them.
        "amin": _extreme,
    },
    below_autograd={
        "median.dim": _median_along,
        "nanmedian.dim": _median_of_numbers_along,
        "cummin": _cumulative_minimum,
        **dict.fromkeys(("norm.Scalar", "norm.ScalarOpt_dim"), _norm),
        "logsumexp": _log_sum_exp,
        "nansum": _sum_of_numbers,
        **dict.fromkeys(("count_nonzero", "count_nonzero.dim_IntList"), _count_nonzero),
    },
    around_below_autograd={
        **dict.fromkeys(("argmax", "argmin"), _place),
        **{f"{name}.dim": partial(_extreme_along, none) for name, none in _OF_NOTHING.items()},
        **{f"a{name}": partial(_extreme_value, none) for name, none in _OF_NOTHING.items()},
        **{name: partial(_extreme_of_all, none) for name, none in _OF_NOTHING.items()},
        "cummax": _cumulative_maximum,
        "mean": _mean,
        "mean.dim": _mean_along,
        **dict.fromkeys(_ALONG_A_DIMENSION, with_a_dimension),
        **dict.fromkeys(_REDUCTIONS, _reduced),
        "linalg_vector_norm": _vector_norm,
        **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _backward_with_a_dimension),
        "nll_loss_forward": _one_loss,
        "nll_loss2d_forward": _loss_of_classes,
        "nll_loss_backward": _one_loss_backward,
        **dict.fromkeys(("cumsum", "cumprod"), _cumulative),
    },
)
