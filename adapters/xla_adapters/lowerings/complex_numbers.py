"""Functions of complex numbers that torch_xla computes wrongly, or has no gradients for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_Tensor = torch.Tensor


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


COMPLEX: dict[Callable[..., _Tensor], Callable[..., _Tensor]] = {
    **dict.fromkeys((torch.abs, _Tensor.abs, _Tensor.__abs__, torch.absolute, _Tensor.absolute), _abs),
    **dict.fromkeys((torch.angle, _Tensor.angle), _angle),
    **dict.fromkeys((torch.sgn, _Tensor.sgn), _sign),
    **dict.fromkeys((torch.div, _Tensor.div, _Tensor.__truediv__, torch.true_divide, _Tensor.true_divide), _divide),
}
