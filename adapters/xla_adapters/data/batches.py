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
    """Yields each sample once, so that those of a batch, which follow each other, have lengths of one bucket.

    Samples of the next shorter bucket fill up the last batch of each. At most one batch has fewer samples than others
    of its bucket: the last, of the shortest samples. The others are in random order. The order depends on the seed and
    the epoch alone.

    Args:
        bounds: of the buckets, ascending.
        rows_of: samples in a batch of each bucket, of all processes.
        lengths: of each sample.
        seed: of the order.
        shuffle: whether the order is random; otherwise it is that of the data, the longest bucket first.
        drop_last: whether a last batch of fewer samples is left out.
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
        self.batch_size = max(rows_of)
        # What the order depends on, for checkpoints.
        self.arranged_by = (*(rows_of if len(set(rows_of)) > 1 else rows_of[:1]), *bounds, seed)
        self._places = numpy.searchsorted(bounds, numpy.asarray(lengths))
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        # Where batches begin and end, of the samples with the longest first.
        self._parts: list[tuple[int, int]] = []
        begin, longest_first = 0, numpy.sort(self._places)[::-1]
        while begin < len(longest_first):
            end = begin + rows_of[longest_first[begin]]
            if end <= len(longest_first) or not drop_last:
                self._parts.append((begin, min(end, len(longest_first))))
            begin = end
        self._whole = len(self._parts) - (begin > len(longest_first) and not drop_last)

    def set_epoch(self, epoch: int) -> None:
        """The next order is that of an epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._parts[-1][1] if self._parts else 0

    @property
    def batch_count(self) -> int:
        """How many batches an epoch has."""
        return len(self._parts)

    def batches(self) -> Iterator[list[int]]:
        """The batches of the epoch."""
        count = len(self._places)
        random = torch.Generator().manual_seed(self._seed + self._epoch)
        order = torch.randperm(count, generator=random).numpy() if self._shuffle else numpy.arange(count)
        # The longest bucket first, each in the order of above.
        order = order[numpy.argsort(-self._places[order], kind="stable")]
        numbers = torch.randperm(self._whole, generator=random).tolist() if self._shuffle else list(range(self._whole))
        for begin, end in [self._parts[number] for number in numbers] + self._parts[self._whole :]:
            yield order[begin:end].tolist()

    def __iter__(self) -> Iterator[int]:
        for batch in self.batches():
            yield from batch


class BucketBatches(BatchSampler):
    """The batches of a `BucketSampler`, for buckets with different numbers of rows.

    Args:
        sampler: that one, which knows the epoch.
        drop_last: as it was given.
    """

    def __init__(self, sampler: BucketSampler, *, drop_last: bool) -> None:
        super().__init__(sampler, sampler.batch_size, drop_last)
        self._batches = sampler

    def set_epoch(self, epoch: int) -> None:
        """The next order is that of an epoch."""
        self._batches.set_epoch(epoch)

    def __len__(self) -> int:
        return self._batches.batch_count

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches.batches()
