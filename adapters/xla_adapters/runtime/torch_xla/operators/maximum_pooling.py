"""Maximum pooling with dilated windows, which torch_xla 2.9 computes on the host, and crashes in the backward."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from xla_adapters.runtime.torch_xla.operators.pooling import per_dim, places_of

_Pooled = tuple[torch.Tensor, torch.Tensor]


def _dilated(
    input: torch.Tensor, sizes: list[int], strides: list[int], around: list[int], apart: list[int], ceil_mode: bool
) -> _Pooled:
    """The maxima, and where they stand in the flattened spatial dimensions; arguments are per dimension.

    For each place in a window, the values of all windows at that place are a slice of the input.
    """
    dims = len(sizes)
    spatial = input.shape[-dims:]
    spans = [(size - 1) * step + 1 for size, step in zip(sizes, apart, strict=True)]
    counts = [
        places_of(length, span, stride, pad, ceil_mode)
        for length, span, stride, pad in zip(spatial, spans, strides, around, strict=True)
    ]
    paddings: list[int] = []
    for length, span, stride, pad, count in zip(spatial, spans, strides, around, counts, strict=True):
        paddings = [pad, max((count - 1) * stride + span - length - pad, 0), *paddings]
    lowest = -math.inf if input.is_floating_point() else torch.iinfo(input.dtype).min
    padded = functional.pad(input, paddings, value=lowest)
    slices = []
    for place in itertools.product(*map(range, sizes)):
        cut: tuple[Any, ...] = tuple(
            slice(offset * step, offset * step + (count - 1) * stride + 1, stride)
            for offset, step, stride, count in zip(place, apart, strides, counts, strict=True)
        )
        slices.append(padded[(..., *cut)])
    values, chosen = torch.stack(slices, -1).max(-1)
    with torch.no_grad():
        position = torch.zeros_like(chosen)
        for index, (length, stride, pad, step) in enumerate(zip(spatial, strides, around, apart, strict=True)):
            offset = torch.div(chosen, math.prod(sizes[index + 1 :]), rounding_mode="floor") % sizes[index]
            start = torch.arange(counts[index], device=input.device) * stride - pad
            start = start.reshape(-1, *[1] * (dims - 1 - index))
            position = position * length + (start + offset * step).clamp(0, length - 1)
    return values, position


def _with_indices(dims: int) -> Callable[..., _Pooled]:
    """`max_pool{2,3}d_with_indices`."""

    def kernel(
        stock: Callable[..., _Pooled],
        self: torch.Tensor,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        dilation: Sequence[int] = (1,),
        ceil_mode: bool = False,
    ) -> _Pooled:
        if all(step == 1 for step in dilation):
            return stock(self, kernel_size, stride, padding, dilation, ceil_mode)
        sizes = per_dim(kernel_size, dims)
        strides, around, apart = (per_dim(values, dims) for values in (stride or sizes, padding, dilation))
        return _dilated(self, sizes, strides, around, apart, ceil_mode)

    return kernel


def _plain(dims: int) -> Callable[..., torch.Tensor]:
    """`max_pool{2,3}d`."""
    pooled = _with_indices(dims)

    def kernel(stock: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        def with_indices(*args: Any) -> tuple[torch.Tensor, None]:
            return stock(*args), None

        return pooled(with_indices, *args)[0]

    return kernel


def _backward(dims: int) -> Callable[..., torch.Tensor]:
    """`max_pool{2,3}d_with_indices_backward`."""

    def kernel(stock: Callable[..., torch.Tensor], grad: torch.Tensor, self: torch.Tensor, *args: Any) -> torch.Tensor:
        *_, dilation, _, indices = args
        if all(step == 1 for step in dilation):
            return stock(grad, self, *args)
        leading, spatial = self.shape[:-dims], self.shape[-dims:]
        flat = torch.zeros((*leading, math.prod(spatial)), dtype=grad.dtype, device=grad.device)
        rows = (one.reshape(*leading, -1) for one in (indices, grad))
        return torch.scatter_add(flat, -1, *rows).reshape(self.shape)

    return kernel


# Kernels whose first argument is torch_xla's own.
AROUND_STOCK: dict[str, Callable[..., Any]] = {
    "max_pool2d": _plain(2),
    "max_pool3d": _plain(3),
    "max_pool2d_with_indices": _with_indices(2),
    "max_pool3d_with_indices": _with_indices(3),
}
# The same, below autograd.
BACKWARD_AROUND_STOCK: dict[str, Callable[..., torch.Tensor]] = {
    f"max_pool{dims}d_with_indices_backward": _backward(dims) for dims in (2, 3)
}
