"""What a batch holds, told from its shapes: nothing is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def sample_count(batch: Any) -> int:
    """The length of the first tensor in it; 0 if there is none."""
    return next((int(tensor.shape[0]) for tensor in _tensors(batch) if tensor.ndim), 0)


def token_count(batch: Any) -> int:
    """The number of its `input_ids`; 0 if it has none."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return int(ids.numel()) if isinstance(ids, torch.Tensor) else 0


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
