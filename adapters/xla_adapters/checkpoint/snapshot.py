"""A copy of a run's state on the host, which no later step changes."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import numpy
import torch

from xla_adapters.backend import get_backend
from xla_adapters.errors import CheckpointSaveError
from xla_adapters.nested_values import Identity, identity, replaced, tensors_in
from xla_adapters.step_scope import in_step

_State = TypeVar("_State")


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
    found: dict[Identity, torch.Tensor] = {}
    for tensor in tensors_in(state):
        found.setdefault(identity(tensor), tensor)
    backend = get_backend()
    on_device = {key: tensor for key, tensor in found.items() if backend.is_backend_tensor(tensor)}
    copies = dict(zip(on_device, backend.to_host(list(on_device.values())), strict=True))
    for key, tensor in found.items():
        if key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True)
    result: _State = replaced(state, lambda tensor: copies[identity(tensor)], _copied)
    return result


def _copied(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, numpy.ndarray) else copy.deepcopy(leaf)
