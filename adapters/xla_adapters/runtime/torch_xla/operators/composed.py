"""Operators that are composed of others, where torch_xla computes them on the host or wrongly."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def _complex(real: torch.Tensor, imag: torch.Tensor) -> torch.Tensor:
    # Below the level where it is a view there is the copy only.
    result: torch.Tensor = torch.ops.aten.view_as_complex_copy(torch.stack(torch.broadcast_tensors(real, imag), -1))
    return result


def _polar(abs: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    return _complex(abs * angle.cos(), abs * angle.sin())


def _index_reduce(
    self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, reduce: str, *, include_self: bool = True
) -> torch.Tensor:
    """As `scatter_reduce` with an index for whole slices."""
    if not self.ndim:
        row, other = self.reshape(1), source.reshape(1)
        return _index_reduce(row, 0, index.reshape(-1), other, reduce, include_self=include_self).reshape(())
    shape = [1] * self.ndim
    shape[dim] = index.numel()
    places = index.reshape(shape).expand(source.shape)
    return torch.scatter_reduce(self, dim, places, source, reduce, include_self=include_self)


def _add_products(
    self: torch.Tensor, batch1: torch.Tensor, batch2: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """`addbmm`."""
    products = torch.bmm(batch1, batch2).sum(0) * alpha
    return products if beta == 0 else self * beta + products


def _batched_products(
    stock: Callable[..., torch.Tensor],
    self: torch.Tensor,
    batch1: torch.Tensor,
    batch2: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    """`baddbmm`. With a factor of zero, what `self` has that is not finite does not count."""
    if beta == 0:
        self = torch.zeros_like(self)
    return stock(self, batch1, batch2, beta=beta, alpha=alpha)


def _einsum(
    stock: Callable[..., torch.Tensor], equation: str, tensors: Sequence[torch.Tensor], *, path: Any = None
) -> torch.Tensor:
    """`einsum`, by torch's composition where torch_xla errs.

    That is for an index that one of the tensors has twice, and in gradients of complex numbers.
    """
    if any(tensor.is_complex() for tensor in tensors):
        return _composed_einsum(equation, tensors, path)
    for indices in equation.partition("->")[0].split(","):
        letters = indices.replace(" ", "").replace("...", "")
        if len(set(letters)) < len(letters):
            return _composed_einsum(equation, tensors, path)
    return stock(equation, tensors, path=path)


def _composed_einsum(equation: str, tensors: Sequence[torch.Tensor], path: Any) -> torch.Tensor:
    result: torch.Tensor = torch.ops.aten.einsum.default.decompose(equation, tensors, path=path)
    return result


def _count_nonzero(self: torch.Tensor, dim: int | Sequence[int] | None = None) -> torch.Tensor:
    """As 64-bit integers, where torch_xla counts in the dtype of the values."""
    nonzero = self != 0
    if dim is None or not self.ndim:
        return nonzero.sum()
    return nonzero.sum(dim if isinstance(dim, int) else list(dim))


def _log_normal_cdf(self: torch.Tensor) -> torch.Tensor:
    """`special_log_ndtr`: by the asymptotic series far below 0, where the probability is not representable."""
    values = self if self.is_floating_point() else self.to(torch.get_default_dtype())
    wide = values.float() if values.dtype.itemsize < 4 else values
    near, low = wide.clamp(min=-8), wide.clamp(max=-8)
    probability = 0.5 * torch.erfc(-near.clamp(max=0) * math.sqrt(0.5))
    above = torch.log1p(-0.5 * torch.erfc(near.clamp(min=0) * math.sqrt(0.5)))
    inverse = low.square().reciprocal()
    series = -inverse * (1 - inverse * (3 - inverse * (15 - inverse * 105)))
    far = -0.5 * low.square() - (-low).log() - 0.5 * math.log(2 * math.pi) + torch.log1p(series)
    result = torch.where(wide < -8, far, torch.where(wide < 0, probability.log(), above))
    return torch.where(wide.isnan(), wide, result).to(values.dtype)


def _hypotenuse(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    one, two = input.abs(), other.abs()
    longer, shorter = torch.maximum(one, two), torch.minimum(one, two)
    # Without squares that overflow.
    ratio = shorter / torch.where(longer == 0, torch.ones_like(longer), longer)
    result = longer * (1 + ratio * ratio).sqrt()
    result = torch.where(one.isnan() | two.isnan(), torch.full_like(result, torch.nan), result)
    return torch.where(one.isinf() | two.isinf(), torch.full_like(result, torch.inf), result)


def _sign_bit(input: torch.Tensor) -> torch.Tensor:
    if not input.is_floating_point():
        return input < 0
    return torch.copysign(torch.ones_like(input), input) < 0


def _pixel_shuffle(self: torch.Tensor, upscale_factor: int) -> torch.Tensor:
    """Also of a single image, which torch_xla takes for a batch."""
    *batch, channels, height, width = self.shape
    factor = upscale_factor
    if channels % factor**2:
        raise RuntimeError(f"pixel_shuffle: {channels} channels are not divisible by {factor} * {factor}")
    parts = self.reshape(*batch, channels // factor**2, factor, factor, height, width)
    row = len(batch) + 1
    order = [*range(row), row + 2, row, row + 3, row + 1]
    return parts.permute(order).reshape(*batch, channels // factor**2, height * factor, width * factor)


def _repeated_places(repeats: torch.Tensor, *, output_size: int | None = None) -> torch.Tensor:
    """`repeat_interleave.Tensor`: for each position of the result the place that it repeats."""
    if output_size is None:
        # How long the result is depends on values, so that it is computed on the host, as by torch_xla.
        return torch.repeat_interleave(repeats.cpu()).to(repeats.device)
    ends = repeats.cumsum(0)
    return torch.searchsorted(ends, torch.arange(output_size, device=repeats.device), right=True).to(repeats.dtype)


def _convolution_over_time(self: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, pad: int = 0) -> torch.Tensor:
    """`conv_tbc`: of (time, batch, channels), with weights of (time, in, out)."""
    channels_first = torch.conv1d(self.permute(1, 2, 0), weight.permute(2, 1, 0), bias, padding=pad)
    return channels_first.permute(2, 0, 1)


def _multilabel_margin(self: torch.Tensor, target: torch.Tensor, reduction: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The targets of a row end at the first -1. torch's decomposition compares with those behind it, too."""
    rows, targets = torch.atleast_2d(self), torch.atleast_2d(target)
    classes = rows.shape[1]
    ended = (targets == -1).cumsum(1) > 0
    places = torch.where(ended, 0, targets)
    given = torch.arange(classes, device=rows.device) == torch.where(ended, -1, targets).unsqueeze(-1)
    is_target = given.any(1)
    margins = (1 - rows.gather(1, places).unsqueeze(-1) + rows.unsqueeze(1)).clamp(min=0)
    counted = ~ended.unsqueeze(-1) & ~is_target.unsqueeze(1)
    losses = torch.where(counted, margins, torch.zeros_like(margins)).sum((1, 2)) / classes
    if reduction == 0:
        losses = losses.reshape(()) if self.ndim < 2 else losses
    else:
        losses = losses.mean() if reduction == 1 else losses.sum()
    return losses, is_target.to(self.dtype).reshape(target.shape)


# torch's own formulas for the gradients call other kernels.
KERNELS: Mapping[str, Callable[..., Any]] = {
    # The tangent of what does not depend on the arguments, in `torch.func.jvp`.
    "_efficientzerotensor": torch.zeros,
    "complex": _complex,
    "polar": _polar,
    "index_reduce": _index_reduce,
    "addbmm": _add_products,
    "hypot": _hypotenuse,
    "signbit": _sign_bit,
    "repeat_interleave.Tensor": _repeated_places,
    **dict.fromkeys(("count_nonzero", "count_nonzero.dim_IntList"), _count_nonzero),
}
# Their first argument is torch_xla's kernel.
AROUND_STOCK: Mapping[str, Callable[..., Any]] = {"baddbmm": _batched_products}
# The same, with operators that have a backward.
AROUND_AUTOGRAD: Mapping[str, Callable[..., Any]] = {"einsum": _einsum}
# Written with operators that have a backward.
DIFFERENTIABLE: Mapping[str, Callable[..., Any]] = {
    "special_log_ndtr": _log_normal_cdf,
    "conv_tbc": _convolution_over_time,
    "pixel_shuffle": _pixel_shuffle,
    "multilabel_margin_loss_forward": _multilabel_margin,
}
