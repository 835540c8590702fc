"""What a batch holds, told from its shapes: nothing is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset

from xla_adapters.host_random import host_random_numbers_kept
from xla_adapters.nested_values import tensors_in


def sample_count(batch: Any) -> int:
    """The length of the first tensor in it; 0 if there is none."""
    return next((int(tensor.shape[0]) for tensor in tensors_in(batch) if tensor.ndim), 0)


def token_count(batch: Any) -> int:
    """The number of its `input_ids`; 0 if it has none."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return int(ids.numel()) if isinstance(ids, torch.Tensor) else 0


def example_of(dataset: Any, size: int, collate: Callable[[list[Any]], Any]) -> Any:
    """A batch of copies of the first sample; the random numbers of the host go on as if it had not been taken.

    Args:
        dataset: anything; None is returned for one without an index (a stream).
        size: samples in the batch.
        collate: makes a batch of samples.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return None
    with host_random_numbers_kept():
        return collate([dataset[0]] * size)
