"""A copy of a run's state on the host, which no later step changes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy
import torch

from xla_adapters.backend import get_backend
from xla_adapters.errors import CheckpointSaveError
from xla_adapters.step_scope import in_step

_State = TypeVar("_State")
_Identity = tuple[object, ...]


def snapshot(state: _State) -> _State:
    """Copies everything in a nested structure that could change: tensors, arrays, and whatever else there is.

    The device's tensors come in one transfer; their buffers are the next step's to reuse (donation). What was one
    tensor (tied weights) is one in the copy.

    Args:
        state: tensors and anything else in mappings, lists and tuples.

    Raises:
        CheckpointSaveError: a step is open.
    """
    if in_step():
        raise CheckpointSaveError(
            "a checkpoint was to be taken inside a step, whose values do not exist yet: save after it"
        )
    found: dict[_Identity, torch.Tensor] = {}
    _collect(state, found)
    backend = get_backend()
    on_device = {key: tensor for key, tensor in found.items() if backend.is_backend_tensor(tensor)}
    copies = dict(zip(on_device, backend.to_host(list(on_device.values())), strict=True))
    for key, tensor in found.items():
        if key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True)
    result: _State = _replace(state, copies)
    return result


def _identity(tensor: torch.Tensor) -> _Identity:
    try:
        storage: object = tensor.untyped_storage()._cdata
    except NotImplementedError:
        storage = id(tensor)
    return (storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _collect(value: Any, found: dict[_Identity, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.setdefault(_identity(value), value)
    elif isinstance(value, Mapping):
        for item in value.values():
            _collect(item, found)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found)


def _replace(value: Any, copies: Mapping[_Identity, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return copies[_identity(value)]
    if isinstance(value, numpy.ndarray):
        return value.copy()
    if isinstance(value, dict):
        # Of its own type, with its attributes: a state dict carries the versions of its modules as one.
        result = copy.copy(value)
        for key, item in value.items():
            result[key] = _replace(item, copies)
        return result
    if isinstance(value, Mapping):
        return {key: _replace(item, copies) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_replace(item, copies) for item in value))
    if type(value) in (list, tuple):
        return type(value)(_replace(item, copies) for item in value)
    return copy.deepcopy(value)
