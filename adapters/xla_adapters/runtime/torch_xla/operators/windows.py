"""Windows of images and volumes, and positions between pixels: pooling, padding, resizing, grids, distances.

What torch_xla 2.9 does otherwise:
- It ignores `divisor_override` of average pools, has no backward for `ceil_mode` with counted padding, and pools
  adaptively only to sizes that divide the input's.
- It computes maximum pools with dilated windows on the host, and crashes in the backward.
- It takes only sizes of padding that are not negative.
- Its kernels for three of the operators that resize compute other numbers on the CPU for sizes that do not divide, and
  have a backward on TPUs only. Here one spatial dimension is resized after the other, as weighted sums of few selected
  positions; positions and weights are those of aten/src/ATen/native/UpSample.h.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.nn import functional

from xla_adapters.runtime.torch_xla.operators.registration import Kernels

_Stock = Callable[..., torch.Tensor]
_Pooled = tuple[torch.Tensor, torch.Tensor]
# Positions in the input, and the weights of these, both of shape (output size,).
_Taps = list[tuple[torch.Tensor, torch.Tensor | None]]
_TapsOf = Callable[[int, int, float | None, torch.Tensor], _Taps]
_decomposed_grid_sampler_2d = decomposition_table[torch.ops.aten.grid_sampler_2d.default]


# ---- pooling --------------------------------------------------------------------------------------


def _per_dim(value: Sequence[int], dims: int) -> list[int]:
    """A number for each dimension: one number stands for all."""
    return list(value) * dims if len(value) == 1 else list(value)


def _average_pool(dims: int) -> Callable[..., torch.Tensor]:
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
        sizes, steps = _per_dim(kernel_size, dims), _per_dim(stride or kernel_size, dims)
        around = _per_dim(padding, dims)
        paddings: list[int] = []
        area: float = 1.0
        counts: torch.Tensor | None = None
        for index, (size, step, pad) in enumerate(zip(sizes, steps, around, strict=True)):
            length = input.shape[input.ndim - dims + index]
            places = _places_of(length, size, step, pad, ceil_mode)
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


def _places_of(length: int, size: int, step: int, pad: int, ceil_mode: bool) -> int:
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
        _places_of(length, span, stride, pad, ceil_mode)
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
        sizes = _per_dim(kernel_size, dims)
        strides, around, apart = (_per_dim(values, dims) for values in (stride or sizes, padding, dilation))
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


# ---- padding and shuffling ------------------------------------------------------------------------


def _pad(stock: Callable[..., torch.Tensor], self: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
    """Pads first: what is cut away can be reflected at the other end."""
    if min(padding) >= 0:
        return stock(self, padding)
    result = stock(self, [max(size, 0) for size in padding])
    for index in range(len(padding) // 2):
        dim = self.ndim - 1 - index
        before, after = (max(-size, 0) for size in padding[2 * index : 2 * index + 2])
        result = result.narrow(dim, before, result.shape[dim] - before - after)
    return result


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


def _convolution_over_time(self: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, pad: int = 0) -> torch.Tensor:
    """`conv_tbc`: of (time, batch, channels), with weights of (time, in, out)."""
    channels_first = torch.conv1d(self.permute(1, 2, 0), weight.permute(2, 1, 0), bias, padding=pad)
    return channels_first.permute(2, 0, 1)


# ---- resizing -------------------------------------------------------------------------------------


def _scale(size: int, to: int, factor: float | None, align_corners: bool) -> float:
    if align_corners:
        return (size - 1) / (to - 1) if to > 1 else 0.0
    return 1 / factor if factor is not None and factor > 0 else size / to


def _nearest(size: int, to: int, factor: float | None, like: torch.Tensor, *, exact: bool) -> _Taps:
    # In float32 for every dtype, as torch.
    position = torch.arange(to, device=like.device, dtype=torch.float32)
    position = (position + 0.5 if exact else position) * _scale(size, to, factor, False)
    return [(position.floor().long().clamp(max=size - 1), None)]


def _source(size: int, to: int, factor: float | None, like: torch.Tensor, align_corners: bool) -> torch.Tensor:
    position = torch.arange(to, device=like.device, dtype=like.dtype)
    scale = _scale(size, to, factor, align_corners)
    return position * scale if align_corners else (position + 0.5) * scale - 0.5


def _linear(size: int, to: int, factor: float | None, like: torch.Tensor, *, align_corners: bool) -> _Taps:
    source = _source(size, to, factor, like, align_corners).clamp(min=0)
    left = source.floor().clamp(max=size - 1)
    weight = (source - left).clamp(0, 1)
    first = left.long()
    return [(first, 1 - weight), ((first + 1).clamp(max=size - 1), weight)]


def _cubic_weight(distance: torch.Tensor, a: float) -> torch.Tensor:
    """Of a position at this distance (not negative) from the source."""
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((distance - 5) * distance + 8) * distance * a - 4 * a
    return torch.where(distance < 1, near, torch.where(distance < 2, far, torch.zeros_like(far)))


def _cubic(size: int, to: int, factor: float | None, like: torch.Tensor, *, align_corners: bool) -> _Taps:
    source = _source(size, to, factor, like, align_corners)
    left = source.floor()
    part, first = source - left, left.long()
    distances = (part + 1, part, 1 - part, 2 - part)
    return [
        ((first + offset).clamp(0, size - 1), _cubic_weight(distance, -0.75))
        for offset, distance in zip((-1, 0, 1, 2), distances, strict=True)
    ]


def _triangle(distance: torch.Tensor) -> torch.Tensor:
    return (1 - distance).clamp(min=0)


def _antialiased(
    size: int,
    to: int,
    factor: float | None,
    like: torch.Tensor,
    *,
    align_corners: bool,
    width: float,
    weight: Callable[[torch.Tensor], torch.Tensor],
) -> _Taps:
    scale = _scale(size, to, factor, align_corners)
    support = width / 2 * max(scale, 1.0)
    center = (torch.arange(to, device=like.device, dtype=like.dtype) + 0.5) * scale
    low = (center - support + 0.5).clamp(min=0).floor()
    high = (center + support + 0.5).floor().clamp(max=size)
    taps: list[tuple[torch.Tensor, torch.Tensor]] = []
    for offset in range(math.ceil(support) * 2 + 1):
        position = low + offset
        inside = (position < high).to(like.dtype)
        taps.append(
            (position.long().clamp(max=size - 1), weight(((position - center + 0.5) / max(scale, 1.0)).abs()) * inside)
        )
    total = sum((weights for _, weights in taps), torch.zeros_like(center))
    return [(position, weights / total) for position, weights in taps]


def _resized(
    input: torch.Tensor, sizes: Sequence[int], factors: Sequence[float | None], taps_of: _TapsOf
) -> torch.Tensor:
    wide = input.dtype if input.dtype.itemsize >= 4 else torch.float32
    result = input.to(wide)
    for index, (to, factor) in enumerate(zip(sizes, factors, strict=True)):
        dim = input.ndim - len(sizes) + index
        size = input.shape[dim]
        taps = taps_of(size, to, factor, result)
        broadcast = [-1, *[1] * (input.ndim - dim - 1)]
        parts = [
            selected if weight is None else selected * weight.reshape(broadcast)
            for selected, weight in ((result.index_select(dim, position), weight) for position, weight in taps)
        ]
        result = sum(parts[1:], parts[0])
    return (result if input.is_floating_point() else result.round()).to(input.dtype)


def _repeated(input: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Each value as often as the sizes are multiples; the backward is a sum, not a scatter."""
    shape = input.shape
    first = input.ndim - len(sizes)
    apart, spread = list(shape[:first]), list(shape[:first])
    for size, to in zip(shape[first:], sizes, strict=True):
        apart += [size, 1]
        spread += [size, to // size]
    return input.reshape(apart).expand(spread).reshape(*shape[:first], *sizes)


def _nearest_kernel(exact: bool) -> Callable[..., torch.Tensor]:
    def kernel(input: torch.Tensor, output_size: Sequence[int], *factors: float | None) -> torch.Tensor:
        sizes = [int(size) for size in output_size]
        given = [*factors, *[None] * (len(sizes) - len(factors))]
        present = input.shape[-len(sizes) :]
        divides = all(to % size == 0 for size, to in zip(present, sizes, strict=True))
        if divides and all(
            factor is None or factor == to / size for size, to, factor in zip(present, sizes, given, strict=True)
        ):
            return _repeated(input, sizes)
        return _resized(input, sizes, given, partial(_nearest, exact=exact))

    return kernel


def _smooth_kernel(taps_of: Callable[..., _Taps]) -> Callable[..., torch.Tensor]:
    def kernel(
        input: torch.Tensor, output_size: Sequence[int], align_corners: bool, *factors: float | None
    ) -> torch.Tensor:
        sizes = [int(size) for size in output_size]
        given = [*factors, *[None] * (len(sizes) - len(factors))]
        return _resized(input, sizes, given, partial(taps_of, align_corners=align_corners))

    return kernel


# ---- grids and distances --------------------------------------------------------------------------


class _Unaffected(torch.autograd.Function):
    """The result, with an argument that it does not depend on."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, argument: torch.Tensor) -> torch.Tensor:
        ctx.shape, ctx.dtype = argument.shape, argument.dtype
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradients[0], gradients[0].new_zeros(ctx.shape, dtype=ctx.dtype)


def _with_zero_gradient(result: torch.Tensor, argument: torch.Tensor) -> torch.Tensor:
    """The result; the argument gets a gradient of zero from it, if it has none from what the result was computed of."""
    if not argument.requires_grad:
        return result
    found: torch.Tensor = _Unaffected.apply(result, argument)  # type: ignore[no-untyped-call]
    return found


def _grid_sampler_3d(
    input: torch.Tensor, grid: torch.Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> torch.Tensor:
    """Of volumes (batch, channels, depth, height, width); modes 0 and 1 are linear and nearest."""
    if input.dtype.itemsize < 4:
        narrow = input.dtype
        wide = _grid_sampler_3d(input.float(), grid.float(), interpolation_mode, padding_mode, align_corners)
        return wide.to(narrow)
    sizes = input.shape[2:]
    # The grid's last dimension is x, y, z.
    positions = [
        _padded(_on_axis(grid[..., 2 - axis], size, align_corners), size, padding_mode, align_corners)
        for axis, size in enumerate(sizes)
    ]
    if interpolation_mode == 1:
        return _with_zero_gradient(_value_at(input, [position.round() for position in positions]), grid)
    lows = [position.floor() for position in positions]
    result: torch.Tensor | None = None
    for corner in range(8):
        bits = [(corner >> axis) & 1 for axis in range(3)]
        weight = torch.ones_like(positions[0])
        for position, low, bit in zip(positions, lows, bits, strict=True):
            weight = weight * ((position - low) if bit else (low + 1 - position))
        part = _value_at(input, [low + bit for low, bit in zip(lows, bits, strict=True)]) * weight.unsqueeze(1)
        result = part if result is None else result + part
    assert result is not None
    return result


def _on_axis(coordinate: torch.Tensor, size: int, align_corners: bool) -> torch.Tensor:
    return coordinate * (size / 2 - 0.5 if align_corners else size / 2) + (size / 2 - 0.5)


def _padded(position: torch.Tensor, size: int, padding_mode: int, align_corners: bool) -> torch.Tensor:
    if padding_mode == 0:
        return position
    if padding_mode == 2:
        low, span = (0.0, size - 1.0) if align_corners else (-0.5, float(size))
        if span == 0:
            return torch.zeros_like(position)
        distance = (position - low).abs()
        extra = torch.fmod(distance, span)
        flipped = (distance / span).floor().fmod(2) != 0
        position = torch.where(flipped, span - extra, extra) + low
    return position.clamp(0, size - 1)


def _value_at(input: torch.Tensor, positions: list[torch.Tensor]) -> torch.Tensor:
    """Zero outside of the volume."""
    batch = torch.arange(input.shape[0], device=input.device).reshape(-1, 1, 1, 1, 1)
    channel = torch.arange(input.shape[1], device=input.device).reshape(1, -1, 1, 1, 1)
    sizes = input.shape[2:]
    inside = torch.ones_like(positions[0], dtype=torch.bool)
    for position, size in zip(positions, sizes, strict=True):
        inside = inside & (position >= 0) & (position < size)
    indices = [position.clamp(0, size - 1).long().unsqueeze(1) for position, size in zip(positions, sizes, strict=True)]
    return input[batch, channel, indices[0], indices[1], indices[2]] * inside.unsqueeze(1).to(input.dtype)


def _grid_sampler_2d(
    input: torch.Tensor, grid: torch.Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> torch.Tensor:
    """torch's decomposition; the gradient of the grid is zero, not missing, where the nearest value is taken."""
    sampled: torch.Tensor = _decomposed_grid_sampler_2d(input, grid, interpolation_mode, padding_mode, align_corners)
    return _with_zero_gradient(sampled, grid)


def _cdist(x1: torch.Tensor, x2: torch.Tensor, p: float, compute_mode: int | None = None) -> torch.Tensor:
    """`_cdist_forward`: of shape (..., rows of x1, rows of x2)."""
    return _lengths(x1.unsqueeze(-2) - x2.unsqueeze(-3), p)


def _pdist(self: torch.Tensor, p: float = 2) -> torch.Tensor:
    """`_pdist_forward`: the distance of each two rows, of shape (rows * (rows - 1) / 2,)."""
    rows = len(self)
    row = torch.arange(rows, device=self.device)
    # Of the distances to later rows.
    start = row * (2 * rows - 1 - row) // 2
    place = torch.arange(rows * (rows - 1) // 2, device=self.device)
    first = (place.unsqueeze(1) >= start).sum(1) - 1
    second = place - start.index_select(0, first) + first + 1
    return _lengths(self.index_select(0, first) - self.index_select(0, second), p)


def _lengths(differences: torch.Tensor, p: float) -> torch.Tensor:
    return _with_zero_gradient(torch.linalg.vector_norm(differences, p, -1), differences)


KERNELS = Kernels(
    differentiable={
        "grid_sampler_2d": _grid_sampler_2d,
        "grid_sampler_3d": _grid_sampler_3d,
        "_cdist_forward": _cdist,
        "_pdist_forward": _pdist,
        "_adaptive_avg_pool2d": _adaptive_average,
        "_adaptive_avg_pool3d": _adaptive_average,
        "adaptive_max_pool2d": _adaptive_maximum,
        "adaptive_max_pool3d": _adaptive_maximum,
        **{f"upsample_nearest{dims}d": _nearest_kernel(exact=False) for dims in (1, 2, 3)},
        **{f"_upsample_nearest_exact{dims}d": _nearest_kernel(exact=True) for dims in (1, 2, 3)},
        "upsample_linear1d": _smooth_kernel(_linear),
        "upsample_bilinear2d": _smooth_kernel(_linear),
        "upsample_trilinear3d": _smooth_kernel(_linear),
        "upsample_bicubic2d": _smooth_kernel(_cubic),
        "_upsample_bilinear2d_aa": _smooth_kernel(partial(_antialiased, width=2, weight=_triangle)),
        "_upsample_bicubic2d_aa": _smooth_kernel(partial(_antialiased, width=4, weight=partial(_cubic_weight, a=-0.5))),
        "conv_tbc": _convolution_over_time,
        "pixel_shuffle": _pixel_shuffle,
    },
    around_differentiable={
        # Kernels whose first argument is torch_xla's own.
        "avg_pool2d": _average_pool(2),
        # Kernels whose first argument is torch_xla's own.
        "avg_pool3d": _average_pool(3),
        **{f"{kind}_pad{dims}d": _pad for kind in ("reflection", "replication") for dims in (1, 2, 3)},
        "max_pool2d": _plain(2),
        "max_pool3d": _plain(3),
        "max_pool2d_with_indices": _with_indices(2),
        "max_pool3d_with_indices": _with_indices(3),
    },
    around_below_autograd={
        **{f"max_pool{dims}d_with_indices_backward": _backward(dims) for dims in (2, 3)},
    },
)
