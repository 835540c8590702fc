"""Writes to what a mask selects, without a read of how many elements that are."""

from __future__ import annotations

from typing import Any

import torch

from xla_adapters.utils.torch_modes import device_type

_Tensor = torch.Tensor


def is_write_by_mask(tensor: Any, index: Any, value: Any) -> bool:
    """Whether `tensor[index] = value` writes the same to each position of a mask.

    The index is a mask of the first dimensions, or has one mask among slices, integers and an ellipsis.
    """
    if not (isinstance(tensor, _Tensor) and tensor.device.type == device_type()):
        return False
    found = _mask_and_dims(tensor, index)
    if found is None:
        return False
    behind = found[2]
    return isinstance(value, (bool, int, float)) or (
        isinstance(value, _Tensor)
        and (value.ndim <= behind or value.shape[-behind - 1] == 1)
        and value.device == tensor.device
        and value.dtype == tensor.dtype
    )


def _mask_and_dims(tensor: _Tensor, index: Any) -> tuple[_Tensor, tuple[Any, ...], int] | None:
    """The mask in an index, the index with whole dimensions in its place, and how many dimensions are behind it."""
    parts = index if isinstance(index, tuple) else (index,)
    masks = [part for part in parts if isinstance(part, _Tensor)]
    if len(masks) != 1 or masks[0].dtype is not torch.bool or not masks[0].ndim:
        return None
    mask, at = masks[0], next(at for at, part in enumerate(parts) if isinstance(part, _Tensor))
    if not all(type(part) in (int, slice) or part is Ellipsis for part in (*parts[:at], *parts[at + 1 :])):
        return None
    named = sum(1 for part in parts if type(part) in (int, slice)) + mask.ndim
    missing = tensor.ndim - named
    if missing < 0 or sum(1 for part in parts if part is Ellipsis) > 1:
        return None
    if all(part is not Ellipsis for part in parts):
        parts = (*parts, Ellipsis)
    whole: list[Any] = []
    for part in parts:
        if part is Ellipsis:
            whole += [slice(None)] * missing
        elif isinstance(part, _Tensor):
            at = len(whole)
            whole += [slice(None)] * mask.ndim
        else:
            whole.append(part)
    if mask.shape != tensor.shape[at : at + mask.ndim]:
        return None
    behind = sum(1 for part in whole[at + mask.ndim :] if type(part) is slice)
    return mask, tuple(whole), behind


def write_where_(tensor: _Tensor, index: Any, value: Any) -> None:
    """As `tensor[index] = value`, for what `is_write_by_mask` accepts."""
    found = _mask_and_dims(tensor, index)
    assert found is not None
    mask, whole, behind = found
    target = tensor if all(part == slice(None) for part in whole) else tensor[whole]
    wide = mask.to(tensor.device).reshape(*mask.shape, *[1] * behind)
    if isinstance(value, _Tensor) and value.ndim:
        if value.ndim > behind:
            # One dimension stands for what the mask selects; the mask has `mask.ndim` in its place.
            value = value.reshape(
                *value.shape[: value.ndim - behind - 1], *[1] * mask.ndim, *value.shape[value.ndim - behind :]
            )
        target.copy_(torch.where(wide, value, target))
    else:
        target.masked_fill_(wide, value)


def write_by_mask(
    input: _Tensor, indices: list[Any] | tuple[Any, ...], values: Any, accumulate: bool = False
) -> _Tensor:
    """As `torch.index_put`."""
    if len(indices) != 1 or not _is_by_first_dims(input, indices[0], values):
        return torch.index_put(input, indices, values, accumulate)
    return torch.where(_widened(indices[0], input), input + values if accumulate else values, input)


def write_by_mask_(
    input: _Tensor, indices: list[Any] | tuple[Any, ...], values: Any, accumulate: bool = False
) -> _Tensor:
    """As `Tensor.index_put_`."""
    if len(indices) != 1 or not _is_by_first_dims(input, indices[0], values):
        return input.index_put_(indices, values, accumulate)
    if accumulate or (isinstance(values, _Tensor) and values.ndim):
        return input.copy_(write_by_mask(input, indices, values, accumulate))
    return input.masked_fill_(_widened(indices[0], input), values)


def _is_by_first_dims(input: Any, mask: Any, values: Any) -> bool:
    is_mask = isinstance(mask, _Tensor) and is_write_by_mask(input, mask, values)
    return is_mask and (not isinstance(values, _Tensor) or values.ndim <= input.ndim - mask.ndim)


def _widened(mask: _Tensor, input: _Tensor) -> _Tensor:
    return mask.to(input.device).reshape(*mask.shape, *[1] * (input.ndim - mask.ndim))
