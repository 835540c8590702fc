"""`upsample_*`: resizes one spatial dimension after the other, as weighted sums of few selected positions.

Sources: aten/src/ATen/native/UpSample.h for positions and weights; torch_xla 2.9 has kernels of its own for three of
these operators, which on the CPU compute other numbers for sizes that do not divide, and a backward on TPUs only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

# Positions in the input, and the weights of these, both of shape (output size,).
_Taps = list[tuple[torch.Tensor, torch.Tensor | None]]
_TapsOf = Callable[[int, int, float | None, torch.Tensor], _Taps]


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


KERNELS: dict[str, Callable[..., torch.Tensor]] = {
    **{f"upsample_nearest{dims}d": _nearest_kernel(exact=False) for dims in (1, 2, 3)},
    **{f"_upsample_nearest_exact{dims}d": _nearest_kernel(exact=True) for dims in (1, 2, 3)},
    "upsample_linear1d": _smooth_kernel(_linear),
    "upsample_bilinear2d": _smooth_kernel(_linear),
    "upsample_trilinear3d": _smooth_kernel(_linear),
    "upsample_bicubic2d": _smooth_kernel(_cubic),
    "_upsample_bilinear2d_aa": _smooth_kernel(partial(_antialiased, width=2, weight=_triangle)),
    "_upsample_bicubic2d_aa": _smooth_kernel(partial(_antialiased, width=4, weight=partial(_cubic_weight, a=-0.5))),
}
