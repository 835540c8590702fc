"""Brings the results of an evaluation batch to the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from xla_adapters import get_backend


def to_host_in_one_transfer(results: Any) -> Any:
    """Copies every tensor of a nested structure to the host, all in one transfer.

    The evaluation loop then concatenates batches on the host; on the device each concatenation
    would be a new shape, and a compile.
    """
    backend = get_backend()
    found: list[torch.Tensor] = []
    _collect(results, found)
    on_device = [tensor for tensor in found if backend.is_backend_tensor(tensor)]
    copies = dict(zip(map(id, on_device), backend.to_host(on_device), strict=True))
    return _replace(results, copies)


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, Mapping):
        for item in value.values():
            _collect(item, found)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found)


def _replace(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return copies.get(id(value), value)
    if isinstance(value, Mapping):
        return {key: _replace(item, copies) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_replace(item, copies) for item in value)
    return value
