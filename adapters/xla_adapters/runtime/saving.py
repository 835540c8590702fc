"""Lets safetensors save tensors that are on the device."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch

from xla_adapters.runtime.interface import Runtime
from xla_adapters.utils.nested_values import Identity, identity
from xla_adapters.utils.torch_modes import device_type

_Weights = dict[str, torch.Tensor]


def weights_on_host(weights: Mapping[str, Any], runtime: Runtime) -> dict[str, Any]:
    """Copies the tensors of a state dict that are on the device to the host, in one transfer.

    Args:
        weights: by name; values that are no tensors of the device stay as they are.
        runtime: the runtime.

    Returns:
        A new dict. Tied weights are one tensor there, too.
    """
    on_device = {name: identity(value) for name, value in weights.items() if _is_on_device(value)}
    if not on_device:
        return dict(weights)
    found = {key: weights[name] for name, key in on_device.items()}
    copies = dict(zip(found, runtime.transfers.to_host(list(found.values())), strict=True))
    return {name: copies[on_device[name]] if name in on_device else value for name, value in weights.items()}


def save_from_device(runtime: Runtime) -> None:
    """From now on safetensors saves tensors of the device, for the rest of the process.

    safetensors finds tied weights by the addresses of their memory, and refuses a tensor without one.

    Args:
        runtime: copies the tensors to the host.
    """
    library: Any = safetensors.torch
    if hasattr(library._find_shared_tensors, "of_xla_adapters"):
        return
    find, is_complete, flatten = library._find_shared_tensors, library._is_complete, library._flatten_as_ptr

    @functools.wraps(find)
    def find_shared(weights: _Weights) -> list[set[str]]:
        shared: dict[Identity, set[str]] = {}
        for name, value in weights.items():
            if _is_on_device(value):
                shared.setdefault(identity(value), set()).add(name)
        host = {name: value for name, value in weights.items() if not _is_on_device(value)}
        return [*find(host), *shared.values()]

    @functools.wraps(is_complete)
    def covers_its_storage(tensor: torch.Tensor) -> bool:
        return _is_on_device(tensor) or is_complete(tensor)

    @functools.wraps(flatten)
    def flatten_from_host(weights: _Weights, *rest: Any) -> Any:
        if any(map(_is_on_device, weights.values())):
            # Of copies on the host it would not find which are one tensor on the device.
            library._evaluate_tensors_for_save(weights)
            weights = weights_on_host(weights, runtime)
        return flatten(weights, *rest)

    find_shared.of_xla_adapters = True  # type: ignore[attr-defined]
    library._find_shared_tensors = find_shared
    library._is_complete = covers_its_storage
    library._flatten_as_ptr = flatten_from_host


def _is_on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == device_type()
