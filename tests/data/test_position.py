"""The random numbers that reading draws: those of all, or its own, and the same ones when batches are read again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from xla_adapters.data.position import NOTED_DRAWS, BatchUnit, ReadingStream
from xla_adapters.errors import CheckpointError
from xla_adapters.utils.host_random import HostRandom

pytestmark = pytest.mark.isolated


def drawn() -> tuple[float, float, float]:
    """A number of each generator."""
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def seed(number: int) -> None:
    torch.manual_seed(number), random.seed(number), numpy.random.seed(number)


class _Reader:
    """Reads batches that draw, one after another.

    Args:
        between: called with the number of a batch when it was read.
    """

    def __init__(self, between: Callable[[int], object] = lambda number: None) -> None:
        self.stream = ReadingStream()
        self.number = 0
        self._between = between

    def read(self, batches: int) -> list[Any]:
        found = []
        for _ in range(batches):
            with self.stream.reading(epoch=1):
                found.append(drawn())
            self.number += 1
            self._between(self.number)
        return found


def _after_some(number: int) -> None:
    if number % 3 == 0:
        drawn()


def _after_each(number: int) -> None:
    drawn()


READS = 2 * NOTED_DRAWS
BETWEEN = {"nothing": lambda number: None, "some": _after_some, "each": _after_each}


def test_without_draws_in_between_all_is_as_without_a_stream() -> None:
    seed(0)
    found = _Reader().read(READS)
    after = HostRandom.now()
    seed(0)
    assert found == [drawn() for _ in range(READS)]
    assert HostRandom.now().equals(after)


def test_few_draws_in_between_change_what_is_read_as_without_a_stream() -> None:
    def all_draws(read: Callable[[], Any]) -> list[Any]:
        seed(0)
        found = []
        for number in range(1, READS + 1):
            found.append(read())
            _after_some(number)
        return found

    reader = _Reader()
    assert all_draws(lambda: reader.read(1)[0]) == all_draws(drawn)


def test_after_many_draws_reading_has_numbers_of_its_own() -> None:
    """They repeat, and what is drawn in between no longer matters."""
    seed(0)
    found = _Reader(_after_each).read(READS)
    assert len({value for batch in found for value in batch}) == 3 * READS
    seed(0)
    reader = _Reader(_after_each)
    assert reader.read(NOTED_DRAWS + 2) == found[: NOTED_DRAWS + 2]
    drawn(), drawn()
    assert reader.read(READS - NOTED_DRAWS - 2) == found[NOTED_DRAWS + 2 :]


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("done", [1, 2, 3, NOTED_DRAWS, NOTED_DRAWS + 1, NOTED_DRAWS + 2, READS - 1])
def test_reads_are_done_again(between: str, done: int) -> None:
    seed(0)
    reader = _Reader(BETWEEN[between])
    before = reader.read(done)
    saved = reader.stream.to_save()
    assert saved is not None
    rest = reader.read(READS - done)
    # The process that resumes has drawn other numbers.
    seed(9)
    again = _Reader(lambda number: number <= done or BETWEEN[between](number))
    again.stream.go_on(saved, done, skips=False, same=True)
    assert again.read(done) == before
    assert again.read(READS - done) == rest


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("done", [2, NOTED_DRAWS, NOTED_DRAWS + 3])
def test_reads_that_drew_nothing_are_skipped(between: str, done: int) -> None:
    """A first read draws the order of the epoch. Reading begins to draw after the save."""

    def order_or_batch(stream: ReadingStream, *, draws: bool) -> Any:
        with stream.reading(epoch=1):
            return drawn() if draws else None

    seed(0)
    stream = ReadingStream()
    order = order_or_batch(stream, draws=True)
    for number in range(1, done):
        BETWEEN[between](number)
        order_or_batch(stream, draws=False)
    BETWEEN[between](done)
    saved = stream.to_save()
    assert saved is not None
    assert not saved["draws"]
    rest = []
    for number in range(done + 1, READS):
        rest.append(order_or_batch(stream, draws=number > done + 1))
        BETWEEN[between](number)

    seed(9)
    again, found = ReadingStream(), [None]
    again.go_on(saved, done, skips=True, same=True)
    assert order_or_batch(again, draws=True) == order
    for number in range(done + 2, READS):
        BETWEEN[between](number - 1)
        found.append(order_or_batch(again, draws=True))
    assert found == rest


def test_a_read_that_fails_leaves_the_numbers_of_others() -> None:
    seed(0)
    reader = _Reader(_after_each)
    reader.read(NOTED_DRAWS + 2)
    before = HostRandom.now()
    with pytest.raises(StopIteration), reader.stream.reading(epoch=1):
        drawn()
        raise StopIteration
    assert HostRandom.now().equals(before)


# ---- what a number of batches means ------------------------------------------------------------------

DATA = TensorDataset(torch.arange(24.0))


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from range(24)


class _Own(BatchSampler):
    pass


def _unit(batch: int, **options: Any) -> BatchUnit:
    return BatchUnit.of(DataLoader(DATA, batch, **options))


def _stream(batch: int, workers: int) -> BatchUnit:
    return BatchUnit.of(DataLoader(_Stream(), batch, num_workers=workers))


def _own(batch: int) -> BatchUnit:
    return BatchUnit.of(DataLoader(DATA, batch_sampler=_Own(RandomSampler(DATA), batch, drop_last=False)))


def test_batches_of_another_size() -> None:
    assert _unit(2).batches(6, _unit(4)) == 12
    assert _unit(4, shuffle=True, drop_last=True, num_workers=2).batches(6, _unit(2)) == 3
    assert _stream(2, 2).batches(4, _stream(4, 2)) == 8
    assert _stream(2, 1).batches(4, _stream(4, 0)) == 8
    assert _own(3).batches(5, _own(3)) == 5
    assert BatchUnit.of([1, 2, 3]).batches(2, BatchUnit.of([1, 2])) == 2
    assert BatchUnit.of(DataLoader(DATA, 2), processes=2).batches(3, _unit(4)) == 3


@pytest.mark.parametrize(
    ("now", "saved", "told"),
    [
        (_unit(8), _unit(4), "batches of 4 samples .* over 2 times as many"),
        (_unit(4), _own(4), "another batch size"),
        (_own(4), _own(2), "another batch size"),
        (_stream(4, 2), _stream(4, 3), "3 workers in each of 1 processes"),
        (_stream(8, 2), _stream(4, 2), "none of the batches of now"),
        (_stream(2, 2), _stream(4, 2), "none of the batches of now"),
    ],
)
def test_batches_that_have_other_samples(now: BatchUnit, saved: BatchUnit, told: str) -> None:
    assert now.batches(0, saved) == 0
    with pytest.raises(CheckpointError, match=told):
        now.batches(3, saved)


def test_units_are_saved_as_plain_values() -> None:
    for unit in (_unit(2), _own(3), _stream(4, 2)):
        assert BatchUnit.of_saved(unit.to_save()) == unit
