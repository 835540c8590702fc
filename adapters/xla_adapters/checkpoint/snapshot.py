"""Copies a run's state to the host, so that it can be written while training continues."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import numpy
import torch

from xla_adapters.errors import CheckpointSaveError
from xla_adapters.runtime import get_runtime
from xla_adapters.tracing.step_scope import in_step
from xla_adapters.utils.nested_values import Identity, identity, replaced, tensors_in

_State = TypeVar("_State")


def snapshot(state: _State) -> _State:
    """Deep-copies a nested state to the host.

    All device tensors come in one transfer, and the copy does not keep their buffers alive, so the next step may reuse
    them (donation). Tied weights are one tensor in the copy, too.

    Args:
        state: tensors and anything else in mappings, lists and tuples.

    Raises:
        CheckpointSaveError: it is called inside a step.
    """
    if in_step():
        raise CheckpointSaveError(
            "a checkpoint was to be taken inside a step, whose values do not exist yet: save after it"
        )
    found: dict[Identity, torch.Tensor] = {}
    for tensor in tensors_in(state):
        found.setdefault(identity(tensor), tensor)
    runtime = get_runtime()
    on_device = {key: tensor for key, tensor in found.items() if runtime.device.owns(tensor)}
    copies = dict(zip(on_device, runtime.transfers.to_host(list(on_device.values())), strict=True))
    for key, tensor in found.items():
        if key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True)
    result: _State = replaced(state, lambda tensor: copies[identity(tensor)], _copied)
    return result


def _copied(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, numpy.ndarray) else copy.deepcopy(leaf)
