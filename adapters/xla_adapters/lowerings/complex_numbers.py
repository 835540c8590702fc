"""Functions of complex numbers that have real results, for which torch_xla has no gradients."""

from __future__ import annotations

from collections.abc import Callable

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


COMPLEX: dict[Callable[..., _Tensor], Callable[..., _Tensor]] = {
    **dict.fromkeys((torch.abs, _Tensor.abs, _Tensor.__abs__, torch.absolute, _Tensor.absolute), _abs),
    **dict.fromkeys((torch.angle, _Tensor.angle), _angle),
}
