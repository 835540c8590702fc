"""Counts the samples and tokens of a batch from its shapes; no tensor values are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset

from xla_adapters.utils.host_random import host_random_numbers_kept
from xla_adapters.utils.nested_values import tensors_in


def sample_count(batch: Any) -> int:
    """The number of samples: the first dimension of the first tensor in the batch; 0 if there is none."""
    # Each step counts: most batches have a tensor in their first place.
    kind = type(batch)
    first = next(iter(batch.values() if kind is dict else batch), None) if kind in (dict, list, tuple) else batch
    if type(first) is torch.Tensor and first.ndim:
        return int(first.shape[0])
    return next((int(tensor.shape[0]) for tensor in tensors_in(batch) if tensor.ndim), 0)


def token_count(batch: Any) -> int:
    """The number of elements of `input_ids`; 0 if the batch has none."""
    # `Mapping` alone would be asked in Python.
    ids = batch.get("input_ids") if type(batch) is dict or isinstance(batch, Mapping) else None
    return int(ids.numel()) if isinstance(ids, torch.Tensor) else 0


def example_of(dataset: Any, size: int, collate: Callable[[list[Any]], Any]) -> Any:
    """An example batch, of copies of the first sample. Random generators of the host are restored afterwards.

    Args:
        dataset: a map-style dataset.
        size: number of samples in the batch.
        collate: makes a batch of a list of samples.

    Returns:
        The batch; None if the dataset cannot be indexed (a stream).
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return None
    with host_random_numbers_kept():
        return collate([dataset[0]] * size)
