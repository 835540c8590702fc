"""Reading at computed positions: grids, bags of embeddings, and distances between all pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decomposition_table

from xla_adapters.runtime.dense_gradients import warn_of_dense_gradients
from xla_adapters.runtime.torch_xla.operators.zero_gradients import with_zero_gradient

_SUM, _MEAN, _MAX = range(3)
_decomposed_grid_sampler_2d = decomposition_table[torch.ops.aten.grid_sampler_2d.default]


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
        return with_zero_gradient(_value_at(input, [position.round() for position in positions]), grid)
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
    return with_zero_gradient(sampled, grid)


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
    return with_zero_gradient(torch.linalg.vector_norm(differences, p, -1), differences)


def _embedding_bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`_embedding_bag`: the bags, the bag of each index, the size of each bag, and where maxima stand."""
    if sparse and weight.requires_grad:
        warn_of_dense_gradients()
    bags = offsets.numel() - int(include_last_offset)
    starts = offsets[:bags]
    place = torch.arange(indices.numel(), device=indices.device)
    bag = (place.unsqueeze(1) >= starts).sum(1) - 1
    counted = torch.ones_like(indices) if padding_idx < 0 else (indices != padding_idx).to(indices.dtype)
    sizes = torch.zeros(bags, dtype=indices.dtype, device=indices.device).index_add(0, bag, counted)
    rows = weight.index_select(0, indices)
    if rows.dtype.itemsize < 4:
        rows = rows.float()
    if scale_grad_by_freq and rows.requires_grad:
        frequency = torch.zeros_like(weight[:, 0], dtype=rows.dtype).index_add(0, indices, torch.ones_like(rows[:, 0]))
        divisor = frequency.detach()[indices].unsqueeze(1)
        rows.register_hook(lambda gradient: gradient / divisor)
    shape = (bags, weight.shape[1])
    if mode == _MAX:
        position = bag.unsqueeze(1).expand_as(rows)
        if padding_idx >= 0:
            rows = rows.masked_fill((counted == 0).unsqueeze(1), -torch.inf)
        lowest = torch.full(shape, -torch.inf, dtype=rows.dtype, device=rows.device)
        highest = lowest.scatter_reduce(0, position, rows, "amax", include_self=True)
        result = torch.where((sizes == 0).unsqueeze(1), torch.zeros_like(highest), highest)
    else:
        factor = counted.to(rows.dtype)
        if per_sample_weights is not None:
            factor = factor * per_sample_weights
        result = torch.zeros(shape, dtype=rows.dtype, device=rows.device).index_add(0, bag, rows * factor.unsqueeze(1))
        if mode == _MEAN:
            result = result / sizes.clamp(min=1).unsqueeze(1).to(rows.dtype)
    return result.to(weight.dtype), bag, sizes, torch.zeros_like(offsets)


KERNELS: dict[str, Callable[..., Any]] = {
    "grid_sampler_2d": _grid_sampler_2d,
    "grid_sampler_3d": _grid_sampler_3d,
    "_cdist_forward": _cdist,
    "_pdist_forward": _pdist,
    "_embedding_bag": _embedding_bag,
    "_embedding_bag_forward_only": _embedding_bag,
}
