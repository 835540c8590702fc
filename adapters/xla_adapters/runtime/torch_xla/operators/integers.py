"""Division and shifts of integers, which torch_xla 2.9 computes wrongly.

It divides in float32, which is exact up to 2**24 only, shifts right as a division by a power of two that rounds toward
zero, and shifts by a tensor to zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xla_adapters.runtime.torch_xla.operators.remainders import as_tensors, rounded_down

_Stock = Callable[..., torch.Tensor]
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# Each division in float32 finds 24 bits more of the 63.
_DIVISIONS = 3


def _are_whole(*values: Any) -> bool:
    return all(value.dtype in _WHOLE if isinstance(value, torch.Tensor) else type(value) is int for value in values)


def _quotient(dividend: torch.Tensor | int, divisor: torch.Tensor | int, *, floors: bool) -> torch.Tensor:
    """Either is a tensor; a number that Python code gave arrives as one."""
    dtype = torch.result_type(dividend, divisor)
    like = dividend if isinstance(dividend, torch.Tensor) else divisor
    assert isinstance(like, torch.Tensor)
    rest, by = (
        value.to(torch.int64)
        if isinstance(value, torch.Tensor)
        else torch.full((), value, dtype=torch.int64, device=like.device)
        for value in (dividend, divisor)
    )
    # Divisible from here on, so that rounding to the nearest is exact in the end.
    rest = rest - (torch.remainder(rest, by) if floors else torch.fmod(rest, by))
    quotient = torch.zeros_like(rest)
    for _ in range(_DIVISIONS):
        part = (rest.to(torch.float32) / by.to(torch.float32)).round().to(torch.int64)
        quotient = quotient + part
        rest = rest - part * by
    return quotient.to(dtype)


def _floor_divide(stock: _Stock, dividend: Any, divisor: Any) -> torch.Tensor:
    if _are_whole(dividend, divisor):
        return _quotient(dividend, divisor, floors=True)
    dividend, divisor = as_tensors(dividend, divisor)
    if torch.result_type(dividend, divisor).is_floating_point:
        return rounded_down(dividend, divisor)
    return stock(dividend, divisor)


def _divide(stock: _Stock, dividend: Any, divisor: Any, *, rounding_mode: str | None = None) -> torch.Tensor:
    if rounding_mode is not None and _are_whole(dividend, divisor):
        return _quotient(dividend, divisor, floors=rounding_mode == "floor")
    dividend, divisor = as_tensors(dividend, divisor)
    if rounding_mode == "floor" and torch.result_type(dividend, divisor).is_floating_point:
        return rounded_down(dividend, divisor)
    return stock(dividend, divisor, rounding_mode=rounding_mode)


def _shifted_right(value: torch.Tensor, places: Any) -> torch.Tensor:
    if not _are_whole(places) and getattr(places, "dtype", type(places)) not in (torch.bool, bool):
        # torch_xla's own ends the process.
        raise TypeError(f"a shift by {places}: only integers can be shifted, by integers")
    return torch.bitwise_right_shift(value, places).to(torch.result_type(value, places))


def _shifted_right_in_place(value: torch.Tensor, places: Any) -> torch.Tensor:
    return value.copy_(torch.bitwise_right_shift(value, places))


KERNELS: dict[str, Callable[..., torch.Tensor]] = {
    **{f"__rshift__.{kind}": _shifted_right for kind in ("Tensor", "Scalar")},
    **{f"__irshift__.{kind}": _shifted_right_in_place for kind in ("Tensor", "Scalar")},
}
# Their first argument is torch_xla's kernel.
AROUND_STOCK: dict[str, Callable[..., Any]] = {"floor_divide": _floor_divide, "div.Tensor_mode": _divide}
