"""Average and adaptive pooling where torch_xla falls back to the host, or ignores an argument.

torch_xla 2.9 ignores `divisor_override`, has no backward for `ceil_mode` with counted padding, and pools adaptively
only to sizes that divide the input's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

_Stock = Callable[..., torch.Tensor]


def per_dim(value: Sequence[int], dims: int) -> list[int]:
    """A number for each dimension: one number stands for all."""
    return list(value) * dims if len(value) == 1 else list(value)


def average_pool(dims: int) -> Callable[..., torch.Tensor]:
    """`avg_pool{1,2,3}d`.

    Args:
        dims: the number of spatial dimensions.

    Returns:
        A kernel; its first argument is what torch_xla does, for arguments that it knows.
    """

    def kernel(
        stock: _Stock,
        input: torch.Tensor,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> torch.Tensor:
        if divisor_override is None and not (ceil_mode and count_include_pad):
            return stock(input, kernel_size, stride, padding, ceil_mode, count_include_pad)
        sizes, steps = per_dim(kernel_size, dims), per_dim(stride or kernel_size, dims)
        around = per_dim(padding, dims)
        paddings: list[int] = []
        area: float = 1.0
        counts: torch.Tensor | None = None
        for index, (size, step, pad) in enumerate(zip(sizes, steps, around, strict=True)):
            length = input.shape[input.ndim - dims + index]
            places = places_of(length, size, step, pad, ceil_mode)
            paddings = [pad, max((places - 1) * step + size - length - pad, 0), *paddings]
            area *= size
            starts = torch.arange(places, device=input.device) * step - pad
            inside = (starts + size).clamp(max=length + pad) - starts
            counts = inside if counts is None else counts.unsqueeze(-1) * inside
        wide = input.float() if input.dtype.itemsize < 4 else input
        average = stock(functional.pad(wide, paddings), sizes, steps, [0], False, True)
        assert counts is not None
        window: tuple[Any, ...] = (..., *map(slice, counts.shape))
        cut = average[window]
        divisor = counts.to(wide.dtype) if divisor_override is None else divisor_override
        return (cut * area / divisor).to(input.dtype)

    return kernel


def places_of(length: int, size: int, step: int, pad: int, ceil_mode: bool) -> int:
    """How many windows there are in one dimension."""
    free = length + 2 * pad - size
    places = (-(-free // step) if ceil_mode else free // step) + 1
    # The last window begins inside the input or the padding before it.
    return places - 1 if ceil_mode and (places - 1) * step >= length + pad else places


def _windows(length: int, to: int) -> list[tuple[int, int]]:
    """Start and length of each window of an adaptive pool."""
    starts = [index * length // to for index in range(to)]
    ends = [-(-(index + 1) * length // to) for index in range(to)]
    return [(start, end - start) for start, end in zip(starts, ends, strict=True)]


def _adaptive_average(input: torch.Tensor, output_size: Sequence[int]) -> torch.Tensor:
    """`_adaptive_avg_pool{2,3}d`."""
    for dim, to in enumerate(output_size, input.ndim - len(output_size)):
        length = input.shape[dim]
        if to and length % to == 0:
            input = input.unflatten(dim, (to, length // to)).mean(dim + 1)
        else:
            parts = [input.narrow(dim, *window).mean(dim, keepdim=True) for window in _windows(length, to)]
            input = torch.cat(parts, dim) if parts else input.narrow(dim, 0, 0)
    return input


def _adaptive_maximum(input: torch.Tensor, output_size: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """`adaptive_max_pool{2,3}d`: the values, and where they stand in the flattened spatial dimensions."""
    dims = len(output_size)
    first = input.ndim - dims
    with torch.no_grad():
        values = input
        spatial = input.shape[first:]
        count = 1
        for length in spatial:
            count *= length
        positions = torch.arange(count, device=input.device).reshape(spatial).expand(input.shape)
        for dim in range(input.ndim - 1, first - 1, -1):
            found, where = [], []
            for window in _windows(input.shape[dim], output_size[dim - first]):
                maximum, at = values.narrow(dim, *window).max(dim, keepdim=True)
                found.append(maximum)
                where.append(positions.narrow(dim, *window).gather(dim, at))
            values, positions = torch.cat(found, dim), torch.cat(where, dim)
    chosen = input.flatten(first).gather(-1, positions.flatten(first))
    return chosen.reshape(positions.shape), positions


KERNELS: dict[str, Callable[..., Any]] = {
    "_adaptive_avg_pool2d": _adaptive_average,
    "_adaptive_avg_pool3d": _adaptive_average,
    "adaptive_max_pool2d": _adaptive_maximum,
    "adaptive_max_pool3d": _adaptive_maximum,
}
# Kernels whose first argument is torch_xla's own.
AROUND_STOCK: dict[str, Callable[..., Any]] = {"avg_pool2d": average_pool(2), "avg_pool3d": average_pool(3)}
