"""Writes to what a mask selects, without a read of how many elements that are."""

from __future__ import annotations

from typing import Any

import torch

_Tensor = torch.Tensor


def is_write_by_mask(tensor: Any, index: Any, value: Any) -> bool:
    """Whether `tensor[index] = value` writes the same to each position of a mask of the first dimensions."""
    if not (isinstance(tensor, _Tensor) and tensor.device.type == "xla"):
        return False
    if not (isinstance(index, _Tensor) and index.dtype is torch.bool and index.shape == tensor.shape[: index.ndim]):
        return False
    return isinstance(value, (bool, int, float)) or (
        isinstance(value, _Tensor)
        and value.ndim <= tensor.ndim - index.ndim
        and value.device == tensor.device
        and value.dtype == tensor.dtype
    )


def write_by_mask(
    input: _Tensor, indices: list[Any] | tuple[Any, ...], values: Any, accumulate: bool = False
) -> _Tensor:
    """As `torch.index_put`."""
    if len(indices) != 1 or not is_write_by_mask(input, indices[0], values):
        return torch.index_put(input, indices, values, accumulate)
    return torch.where(_widened(indices[0], input), input + values if accumulate else values, input)


def write_by_mask_(
    input: _Tensor, indices: list[Any] | tuple[Any, ...], values: Any, accumulate: bool = False
) -> _Tensor:
    """As `Tensor.index_put_`, and as `input[mask] = values` with `indices=[mask]`."""
    if len(indices) != 1 or not is_write_by_mask(input, indices[0], values):
        return input.index_put_(indices, values, accumulate)
    if accumulate or (isinstance(values, _Tensor) and values.ndim):
        return input.copy_(write_by_mask(input, indices, values, accumulate))
    return input.masked_fill_(_widened(indices[0], input), values)


def _widened(mask: _Tensor, input: _Tensor) -> _Tensor:
    return mask.to(input.device).reshape(*mask.shape, *[1] * (input.ndim - mask.ndim))
