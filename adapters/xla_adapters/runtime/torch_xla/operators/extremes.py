"""Extremes, where torch_xla 2.9 takes all dimensions for none, or loses what is not a number, or infinite.

torch's extreme of values with NaN is NaN, and stands where the first NaN does. torch_xla's maximum of minus infinities
is the lowest number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

_Found = tuple[torch.Tensor, torch.Tensor]


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


def _clamp(
    stock: Callable[..., torch.Tensor], self: torch.Tensor, min: float | None = None, max: float | None = None
) -> torch.Tensor:
    """torch_xla's own makes a bound of NaN, and the largest number of infinity, and rounds bounds of integers."""
    if not self.is_floating_point():
        for bound in (min, max):
            self = self if bound is None else self.to(torch.result_type(self, bound))
        return stock(self, min, max)
    if any(bound is not None and bound != bound for bound in (min, max)):
        return torch.full_like(self, torch.nan)
    # Not `masked_fill`, as in `activations`.
    result = self if min is None else torch.where(self < min, torch.full_like(self, min), self)
    return result if max is None else torch.where(result > max, torch.full_like(result, max), result)


def _clamp_from_above(stock: Callable[..., torch.Tensor], self: torch.Tensor, max: float) -> torch.Tensor:
    return _clamp(lambda self, min, max: stock(self, max), self, None, max)


def _clamp_from_below(stock: Callable[..., torch.Tensor], self: torch.Tensor, min: float) -> torch.Tensor:
    return _clamp(lambda self, min, max: stock(self, min), self, min)


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


# What the extreme of no values is.
_NONE = {"max": -math.inf, "min": math.inf}
KERNELS: dict[str, Callable[..., Any]] = {
    "cummin": _cumulative_minimum,
    **dict.fromkeys(("norm.Scalar", "norm.ScalarOpt_dim"), _norm),
}
# Kernels whose first argument is torch_xla's own.
AROUND_STOCK: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("argmax", "argmin"), _place),
    **{f"{name}.dim": partial(_extreme_along, none) for name, none in _NONE.items()},
    **{f"a{name}": partial(_extreme_value, none) for name, none in _NONE.items()},
    **{name: partial(_extreme_of_all, none) for name, none in _NONE.items()},
    "cummax": _cumulative_maximum,
    "clamp": _clamp,
    "clamp_max": _clamp_from_above,
    "clamp_min": _clamp_from_below,
}
# The same, of torch's: above them.
AROUND_AUTOGRAD: Mapping[str, Callable[..., Any]] = {"amax": _extreme, "amin": _extreme}
