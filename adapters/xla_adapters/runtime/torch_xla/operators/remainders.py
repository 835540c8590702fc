"""Remainders and quotients rounded down, by torch's formulas.

torch_xla 2.9 adds the divisor to a remainder and takes the remainder again: what is small beside the divisor is lost,
and 8-bit integers overflow. It rounds a rounded quotient down: `1.0 // 0.1` is 10 and not 9.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def remainder(self: torch.Tensor | float, other: torch.Tensor | float) -> torch.Tensor:
    """`remainder`, with the sign of the divisor. Either is a tensor."""
    dividend, divisor = as_tensors(self, other)
    if dividend.dtype is torch.bool or divisor.dtype is torch.bool:
        dtype = torch.result_type(dividend, divisor)
        dividend, divisor = dividend.to(dtype), divisor.to(dtype)
    rest = torch.fmod(dividend, divisor)
    if not rest.dtype.is_signed:
        return rest
    return torch.where((rest != 0) & ((divisor < 0) != (rest < 0)), rest + divisor, rest)


def rounded_down(dividend: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """The quotient of floats, rounded down as if it were exact."""
    rest = torch.fmod(dividend, divisor)
    exact = (dividend - rest) / divisor
    exact = torch.where((rest != 0) & ((divisor < 0) != (rest < 0)), exact - 1, exact)
    floor = exact.floor()
    floor = torch.where(exact - floor > 0.5, floor + 1, floor)
    quotient = dividend / divisor
    floor = torch.where(exact == 0, torch.copysign(torch.zeros_like(floor), quotient), floor)
    return torch.where(divisor == 0, quotient, floor)


def as_tensors(*values: Any) -> list[torch.Tensor]:
    """torch gives Python numbers to kernels in Python as they are, where those in C++ get tensors."""
    like = next(value for value in values if isinstance(value, torch.Tensor))
    return [
        value
        if isinstance(value, torch.Tensor)
        else torch.full((), value, dtype=torch.result_type(like, value), device=like.device)
        for value in values
    ]


KERNELS: dict[str, Callable[..., torch.Tensor]] = dict.fromkeys(
    ("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor"), remainder
)
