"""Where a training is in its data: what a number of batches means, and the random numbers that reading them draws."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, get_worker_info

from xla_adapters.data.packing import PackedDataset
from xla_adapters.errors import CheckpointError
from xla_adapters.utils.host_random import HostRandom, host_random_numbers_kept

# How often somebody else may draw in an epoch before its reading gets random numbers of its own. A checkpoint has the
# host's random numbers, some 15 kB, once for each time.
NOTED_DRAWS = 16
# The last reads of which the random numbers are kept with which they began: a checkpoint needs those of a read that was
# done ahead, for what is not trained yet.
_NOTED_READS = 256


@dataclass(frozen=True)
class BatchUnit:
    """What it depends on which samples the first batches of an epoch have.

    Attributes:
        rows: samples in a batch, of all processes; None if something else than the batch size decides.
        order: batch sizes, and what else, that samplers arrange the samples by.
        workers: that read a stream in turn, or 1.
        processes: that read a stream, or 1.
    """

    rows: int | None = None
    order: tuple[int, ...] = ()
    workers: int = 1
    processes: int = 1

    @classmethod
    def of(cls, loader: Any, processes: int = 1) -> BatchUnit:
        """The unit of a loader.

        Args:
            loader: a `DataLoader`, or something else that yields batches.
            processes: how many processes read the data together, each its part of a batch.
        """
        batches = getattr(loader, "batch_sampler", None)
        if batches is None:
            batches = getattr(loader, "sampler", None)
        plain = getattr(batches, "batch_sampler", batches) if processes > 1 else batches
        size = getattr(batches, "batch_size", None)
        arranging = [getattr(plain, "sampler", None)]
        if type(plain) is not BatchSampler:
            arranging.append(plain)
        sizes = [
            number
            for sampler in arranging
            for number in getattr(sampler, "arranged_by", (getattr(sampler, "batch_size", None),))
        ]
        dataset = getattr(loader, "dataset", None)
        if isinstance(dataset, PackedDataset):
            sizes += dataset.arranged_by
        split = getattr(batches, "split_batches", False)
        rows = size * (1 if split else processes) if type(plain) is BatchSampler and size else None
        order = tuple(int(found) for found in sizes if found is not None)
        if isinstance(getattr(loader, "dataset", None), IterableDataset):
            return cls(rows, order, max(1, loader.num_workers), processes)
        return cls(rows, order)

    def to_save(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def of_saved(cls, saved: Mapping[str, Any]) -> BatchUnit:
        """Reads what `to_save` returned."""
        return cls(**{**saved, "order": tuple(saved["order"])})

    def batches(self, number: int, saved: BatchUnit) -> int:
        """How many batches of this unit have the same samples as a number of batches of another one.

        Args:
            number: how many.
            saved: their unit.

        Raises:
            CheckpointError: none have.
        """
        if saved == self or not number:
            return number
        was = f"The checkpoint was saved after {number} batches of its epoch"
        remedy = "resume with the settings of then, or from a checkpoint of the end of an epoch"
        if self.order != saved.order or (self.rows is None) != (saved.rows is None):
            raise CheckpointError(
                f"{was}, and its samples were arranged by another batch size, seed or other lengths than now (by a "
                f"sampler that groups them, say), so that no other batches have the same samples: {remedy}"
            )
        if (self.workers, self.processes) != (saved.workers, saved.processes):
            raise CheckpointError(
                f"{was}, and its stream was read by {saved.workers} workers in each of {saved.processes} processes, "
                f"which is now read by {self.workers} in {self.processes}: they get other samples first. So {remedy}"
            )
        if self.rows is None or saved.rows is None:
            return number
        done = number * saved.rows
        # Each worker must have read whole batches, of then and of now.
        if done % (self.workers * self.rows) or done % (saved.workers * saved.rows):
            fits = math.gcd(saved.rows, self.rows)
            raise CheckpointError(
                f"{was}, of {saved.rows} samples each, and none of the batches of now, of {self.rows}, begins with the "
                f"sample after these {done}: resume with batches of {fits} samples (and accumulate gradients over "
                f"{self.rows // fits} times as many), or from a checkpoint of the end of an epoch"
            )
        return done // self.rows


class ReadingStream:
    """The random numbers with which the data of an epoch is read; a context for each read.

    They come from the generators that all draw from, as without this class, so that the same seed gives the same
    batches. What somebody else draws between two reads is noted, so that batches can be read a second time. If it is
    drawn often, reading goes on with a branch of the random numbers, of which nobody else takes any.
    """

    def __init__(self) -> None:
        self._number = self._reads = 0
        # The state with which a read begins, if it is not the one that the read before has ended with.
        self._begins: dict[int, HostRandom] = {}
        self._own: HostRandom | None = None
        self._outside: HostRandom | None = None
        # With which numbers of its own and of all others a read began, by the number of the read.
        self._before: dict[int, tuple[HostRandom, HostRandom]] = {}
        self._is_apart = self._draws = False
        # Of a checkpoint, until its reads are done again: the state, the last of the reads, and how they are done.
        self._saved: Mapping[str, Any] | None = None
        self._last_again = 0
        self._skips = self._same = False

    def to_save(self, reads: int | None = None) -> dict[str, Any] | None:
        """Plain values, with which another stream goes on; None before the first read.

        Args:
            reads: after how many; later ones are done again. By default after all.
        """
        if self._own is None:
            return None
        own, now = self._before.get((self._reads if reads is None else reads) + 1, (self._own, HostRandom.now()))
        return {
            "begins": {number: state.to_save() for number, state in self._begins.items()},
            "own": own.to_save(),
            "apart": self._is_apart,
            # The first read draws the order of the epoch, too: what else, nobody knows.
            "draws": self._reads < 2 or self._draws,
            "now": now.to_save(),
        }

    def go_on(self, saved: Mapping[str, Any], reads: int, *, skips: bool, same: bool) -> None:
        """Goes on after reads that were done before a checkpoint was saved.

        After them the random numbers are those of the time of the save, of this stream and of all others.

        Args:
            saved: what `to_save` returned then.
            reads: how many. They are done again, unless a sampler skips them.
            skips: whether a sampler skips them. Then none of them draws, but for the order of the epoch, which the
                first read after them draws again.
            same: whether they read the same batches as then.
        """
        self._saved, self._skips, self._same = saved, skips, same
        self._reads, self._last_again = (reads, reads + 1) if skips else (0, reads)
        begins = {number: HostRandom.of_saved(state) for number, state in saved["begins"].items()}
        self._begins = begins if same else {1: begins[1]}

    def reading(self, epoch: int) -> ReadingStream:
        """The context of the next read.

        Args:
            epoch: its number, from 0, which the branch depends on.
        """
        self._number = epoch
        return self

    def __enter__(self) -> None:
        self._reads += 1
        if self._saved is not None:
            begin = self._begins.get(1 if self._skips else self._reads)
            if begin is not None:
                self._own = begin
                begin.restore()
            return
        now = HostRandom.now()
        self._note(now)
        self._before[self._reads] = cast(HostRandom, self._own), now
        self._before.pop(self._reads - _NOTED_READS, None)
        if self._is_apart:
            self._outside = now
            cast(HostRandom, self._own).restore()

    def _note(self, now: HostRandom) -> None:
        """A read begins with this state: has somebody else drawn since the read before?"""
        if self._is_apart or (self._own is not None and self._own.equals(now)):
            return
        if self._own is None or len(self._begins) <= NOTED_DRAWS:
            self._own = now
        else:
            self._is_apart, self._own = True, self._own.branch(self._number)
        self._begins[self._reads] = self._own

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        before, self._own = cast(HostRandom, self._own), HostRandom.now()
        if self._outside is not None:
            self._outside.restore()
            self._outside = None
        if self._reads > 1 and not self._skips:
            self._draws |= not before.equals(self._own)
        if self._saved is not None and self._reads == self._last_again:
            self._catch_up(self._saved)

    def _catch_up(self, saved: Mapping[str, Any]) -> None:
        """The reads of a checkpoint are done: everything is as it was when it was saved."""
        self._own, self._is_apart, now = (
            HostRandom.of_saved(saved["own"]),
            saved["apart"],
            HostRandom.of_saved(saved["now"]),
        )
        now.restore()
        self._saved = None
        if self._skips:
            # The read that ends is the first after them.
            self._note(now)
        elif not self._same:
            self._begins[self._reads + 1] = self._own if self._is_apart else now
        self._skips = False


# ---- workers --------------------------------------------------------------------------------------


def renew_workers(loader: Any, epoch: int) -> None:
    """Seeds persistent workers for an epoch that starts, so that a resumed run gets the same random augmentations.

    torch seeds a worker only when it starts. With `persistent_workers=True` its random numbers go on in the next epoch,
    whereas a process that resumes in that epoch starts new workers. Nothing is drawn from the random generators of this
    process.

    Args:
        loader: the loader of the epoch; nothing is done without persistent workers.
        epoch: its number, from 0.
    """
    if not isinstance(loader, DataLoader) or not loader.persistent_workers or not loader.num_workers:
        return
    if epoch == 0:
        # Starts new workers, as a new process does.
        loader._iterator = None
        return
    iterator: Any = loader._iterator
    if iterator is None:
        # A resumed run: start the workers here, without drawing, since the first epoch has drawn for it.
        with ExitStack() as stack:
            stack.enter_context(host_random_numbers_kept())
            for generator in generators_of(loader):
                stack.callback(generator.set_state, generator.get_state())
            iterator = loader._iterator = loader._get_iterator()
    # torch sends this to each worker when the loader is iterated again, and itself uses it for data pipes only.
    iterator._shared_seed = _Reseeds(HostRandom.now().seed(epoch))


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators of a loader and of its samplers, each once."""
    found: dict[int, torch.Generator] = {}
    seen: set[int] = set()
    queue = [loader]
    while queue:
        holder = queue.pop(0)
        if holder is None or id(holder) in seen:
            continue
        seen.add(id(holder))
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator
        queue += [getattr(holder, name, None) for name in ("base_dataloader", "batch_sampler", "sampler")]
    return list(found.values())


class _Reseeds:
    """Seeds the worker process in which it is unpickled."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return _seed_worker, (self._seed,)


def _seed_worker(seed: int) -> None:
    worker = get_worker_info()
    if worker is not None:
        seed = (seed + worker.id) % 2**32
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
