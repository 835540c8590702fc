"""Batches: samplers that form them within buckets of lengths, and how many samples and tokens they have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch.utils.data import BatchSampler, IterableDataset, Sampler

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


class BucketSampler(Sampler[int]):
    """Yields each sample once, so that successive `batch_size` samples have lengths of one bucket.

    Samples of the next shorter bucket fill up the last batch of each. At most one batch has fewer than `batch_size`
    samples: the last, of the shortest samples. The others are in random order. The order depends on the seed and the
    epoch alone.

    Args:
        bounds: of the buckets, ascending.
        lengths: of each sample.
        batch_size: samples in a batch, of all processes.
        seed: of the order.
        shuffle: whether the order is random; otherwise it is that of the data, within each bucket.
        drop_last: whether a last batch of fewer samples is left out.
    """

    def __init__(
        self,
        bounds: Sequence[int],
        lengths: Sequence[int],
        batch_size: int,
        *,
        seed: int,
        shuffle: bool,
        drop_last: bool,
    ) -> None:
        self.batch_size = batch_size
        # What the order depends on, for checkpoints.
        self.arranged_by = (batch_size, *bounds, seed)
        self._places = numpy.searchsorted(bounds, numpy.asarray(lengths))
        self._seed = seed
        self._shuffle = shuffle
        self._drops_last = drop_last
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The next order is that of an epoch."""
        self._epoch = epoch

    def generator(self) -> torch.Generator:
        """The random numbers of the order of the epoch."""
        return torch.Generator().manual_seed(self._seed + self._epoch)

    def __len__(self) -> int:
        count = len(self._places)
        return count - count % self.batch_size if self._drops_last else count

    def __iter__(self) -> Iterator[int]:
        count, rows = len(self._places), self.batch_size
        random = self.generator()
        order = _by_bucket(self._places, random if self._shuffle else None)
        full = count // rows
        for number in torch.randperm(full, generator=random).tolist() if self._shuffle else range(full):
            yield from order[number * rows : (number + 1) * rows].tolist()
        if not self._drops_last:
            yield from order[full * rows :].tolist()


def _by_bucket(places: Any, random: torch.Generator | None) -> Any:
    """Samples in random order or as they are, those of the longest bucket first."""
    count = len(places)
    order = numpy.arange(count) if random is None else torch.randperm(count, generator=random).numpy()
    return order[numpy.argsort(-places[order], kind="stable")]


class BucketBatches(BatchSampler):
    """Yields batches of lengths of one bucket each, as lists of samples; each bucket has its own number of rows.

    Samples of the next shorter bucket fill up the last batch of each. At most one batch has fewer rows than others of
    its bucket: the last. The order depends on the seed and the epoch alone.

    Args:
        bounds: of the buckets, ascending.
        rows_of: samples in a batch of each bucket.
        lengths: of each sample.
        seed: of the order.
        shuffle: whether the order is random; otherwise it is that of the data, the longest bucket first.
        drop_last: whether a last batch of fewer rows is left out.
    """

    def __init__(
        self,
        bounds: Sequence[int],
        rows_of: Sequence[int],
        lengths: Sequence[int],
        *,
        seed: int,
        shuffle: bool,
        drop_last: bool,
    ) -> None:
        # As loaders want to know them of any batch sampler; the sampler knows the epoch.
        self.sampler = self._order = BucketSampler(bounds, lengths, 1, seed=seed, shuffle=shuffle, drop_last=drop_last)
        self.batch_size = max(rows_of)
        self.drop_last = drop_last
        # What the order depends on, for checkpoints.
        self.arranged_by = (*rows_of, *bounds, seed)
        self._shuffle = shuffle
        self._places = numpy.searchsorted(bounds, numpy.asarray(lengths))
        self._parts: list[tuple[int, int]] = []
        begin, longest_first = 0, numpy.sort(self._places)[::-1]
        while begin < len(longest_first):
            end = begin + rows_of[longest_first[begin]]
            self._parts.append((begin, end))
            begin = end
        self._has_partial = begin > len(longest_first)
        if self._has_partial and drop_last:
            self._parts.pop()
            self._has_partial = False

    def set_epoch(self, epoch: int) -> None:
        """The next order is that of an epoch."""
        self._order.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[list[int]]:
        random = self._order.generator()
        order = _by_bucket(self._places, random if self._shuffle else None)
        whole = len(self._parts) - self._has_partial
        numbers = torch.randperm(whole, generator=random).tolist() if self._shuffle else list(range(whole))
        for number in [*numbers, *range(whole, len(self._parts))]:
            begin, end = self._parts[number]
            yield order[begin:end].tolist()
