"""Cumulative operators for programs of several ranks: torch_tpu's scans do not compile there.

XLA's partitioner (Shardy) refuses the tuples of a scan ("Shardy propagation doesn't support tuples"). Here a scan is as
many shifted operations as its length has bits (Hillis and Steele 1986); sums of floating point numbers are rounded in
another order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.library import Library, get_kernel
from torch_tpu._internal.execution_mode import execution_mode_impl as _modes

_KEY = "PrivateUse1"
_RECORD = _modes._EagerMode.INTERNAL_COMPILE_FX_GRAPH


def _shifts(length: int) -> list[int]:
    return [1 << bit for bit in range(max(0, length - 1).bit_length())]


def _scanned(
    value: torch.Tensor, dim: int, combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], neutral: float
) -> torch.Tensor:
    if not value.ndim:
        return value.clone()
    length = value.shape[dim]
    for shift in _shifts(length):
        before = value.narrow(dim, 0, length - shift)
        filler = torch.full_like(value.narrow(dim, 0, shift), neutral)
        value = combine(torch.cat([filler, before], dim), value)
    return value


def _in_dtype(value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    integral = not (value.is_floating_point() or value.is_complex())
    return value.to(dtype if dtype is not None else torch.int64 if integral else value.dtype)


def _cumsum(value: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _scanned(_in_dtype(value, dtype), dim, torch.add, 0)


def _cumprod(value: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _scanned(_in_dtype(value, dtype), dim, torch.mul, 1)


def _logcumsumexp(value: torch.Tensor, dim: int) -> torch.Tensor:
    return _scanned(value, dim, _logaddexp, -torch.inf)


def _logaddexp(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """As `torch.logaddexp`, which torch_tpu does not have."""
    largest = torch.maximum(one, other)
    # Two infinities have no difference.
    return torch.where(largest.isinf(), largest, largest + torch.log1p(torch.exp(-(one - other).abs())))


def _extreme(is_beaten: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """`cummax` or `cummin`: of equal values the later one counts, and NaN beats all."""

    def compute(value: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not value.ndim:
            return value.clone(), torch.zeros_like(value, dtype=torch.int64)
        length, shape = value.shape[dim], [1] * value.ndim
        shape[dim] = length
        index = torch.arange(length, device=value.device).reshape(shape).expand_as(value)
        for shift in _shifts(length):
            late, early = value.narrow(dim, shift, length - shift), value.narrow(dim, 0, length - shift)
            stays = is_beaten(early, late) | late.isnan()
            first, where = value.narrow(dim, 0, shift), index.narrow(dim, 0, shift)
            later, earlier = index.narrow(dim, shift, length - shift), index.narrow(dim, 0, length - shift)
            value = torch.cat([first, torch.where(stays, late, early)], dim)
            index = torch.cat([where, torch.where(stays, later, earlier)], dim)
        return value, index

    return compute


@cache
def mend_scans() -> Library:
    """Replaces the operators in steps. Once in a process, if it is one of several ranks."""
    library = Library("aten", "IMPL")
    kernels: dict[str, Callable[..., Any]] = {
        "cumsum": _cumsum,
        "cumprod": _cumprod,
        "logcumsumexp": _logcumsumexp,
        "cummax": _extreme(torch.le),
        "cummin": _extreme(torch.ge),
    }
    for name, kernel in kernels.items():
        library.impl(name, _in_steps(name, kernel), _KEY, with_keyset=True, allow_override=True)
    return library


def _in_steps(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    former = get_kernel(f"aten::{name}", _KEY)

    def compute(keys: Any, *args: Any, **options: Any) -> Any:
        if _modes._get_eager_mode() == _RECORD:
            return kernel(*args, **options)
        return former.call_boxed(keys, *args, **options)

    return compute
