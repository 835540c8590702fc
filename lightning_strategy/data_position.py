"""What a checkpoint holds so that a fit goes on exactly: random numbers, and where in its training data it is.

Lightning saves the position of loaders that have a `state_dict`. With other loaders a run that resumes in the middle
of an epoch begins with the epoch's first batch again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch.loops.fit_loop
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher

from xla_adapters import get_runtime
from xla_adapters.data.position import BatchUnit, ReadingStream, generators_of, renew_workers
from xla_adapters.errors import CheckpointError
from xla_adapters.runtime.rng import resume_random_algorithm
from xla_adapters.utils.host_random import HostRandom
from xla_adapters.utils.patching import replaced


class DataPosition:
    """Tracks how much of an epoch's data was used, and the random numbers with which the epoch began.

    A resumed run restores these random numbers and skips the batches that were used.

    Args:
        trainer: whose training data it is.

    Attributes:
        began_with: the host's random numbers at the beginning of this epoch; None if its loaders save their position
            themselves.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.began_with: HostRandom | None = None
        self._generators_began: list[torch.Tensor] = []
        # Of the checkpoint that is resumed from, until they are used: the random numbers with which its epoch began,
        # those at the time of the save, the position, and the epoch.
        self._resumed_beginning: HostRandom | None = None
        self._resumed_now: HostRandom | None = None
        self._resumed_position: Mapping[str, Any] | None = None
        self._resumed_epoch: int | None = None
        self._random = ReadingStream()

    @property
    def epoch(self) -> int:
        """The number of the epoch under way."""
        loop: Any = self._trainer.fit_loop
        return int(loop.epoch_progress.current.processed)

    def position(self) -> dict[str, Any] | None:
        """The position to save in the middle of an epoch; None at its end, and for loaders that save it themselves."""
        loop: Any = self._trainer.fit_loop
        if self.began_with is None or self._has_ended():
            return None
        # A batch that was read and not trained is one of the rest.
        done = loop.epoch_loop.batch_progress.current.processed
        return {
            "batches": done,
            "units": [unit.to_save() for unit in self._units()],
            "began_with": self.began_with.to_save(),
            "random": self._random.to_save(done),
        }

    @property
    def next_epoch(self) -> int:
        """The number of the epoch that the next batch is from: this one, or at its end the one after it."""
        loop: Any = self._trainer.fit_loop
        return int(loop.epoch_progress.current.ready) if self._has_ended() else self.epoch

    def _has_ended(self) -> bool:
        """Whether all batches of the epoch were read and trained."""
        loop: Any = self._trainer.fit_loop.epoch_loop
        counts = loop.batch_progress.current
        return bool(loop._num_ready_batches_reached()) and counts.processed >= counts.ready

    def generators(self) -> list[torch.Tensor]:
        """The states of the loaders' `torch.Generator`s with which the epoch `next_epoch` begins."""
        ended = self.began_with is None or self._has_ended()
        return [generator.get_state() for generator in self._own_generators()] if ended else self._generators_began

    def resume(
        self,
        position: Mapping[str, Any] | None,
        host: HostRandom,
        epoch: int | None,
        generators: Sequence[torch.Tensor],
    ) -> None:
        """The data goes on from a saved position; after a save at the end of an epoch, with the next epoch.

        Args:
            position: as `position` returned it.
            host: the host's random numbers at the time of the save.
            epoch: `next_epoch` at that time; Lightning counts the epoch only after its data has begun.
            generators: as `generators` returned them.
        """
        self._resumed_epoch, self._generators_began = epoch, list(generators)
        self._resumed_beginning, self._resumed_position, self._resumed_now = host, position, host
        if position is not None:
            self._resumed_beginning = HostRandom.of_saved(position["began_with"])
            # Lightning's warning is wrong then.
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")

    def before_batch(self) -> None:
        """A training batch is about to be read or computed: restores random numbers if a resumed run begins with it."""
        if self._resumed_now is not None:
            self._resumed_now.restore()
            self._resumed_now = None

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Until the exit, the run's training batches come from a `_TrackedFetcher`."""
        module = lightning.pytorch.loops.fit_loop
        select = vars(module)["_select_data_fetcher"]

        def selected(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
            fetcher = select(trainer, *args, **kwargs)
            followed = trainer is self._trainer and type(fetcher) is _PrefetchDataFetcher
            if followed and not any(isinstance(loader, _Stateful) for loader in self._loaders()):
                fetcher.__class__ = _TrackedFetcher
                fetcher.data = self
            return fetcher

        # `resume` adds a filter.
        with replaced(module, "_select_data_fetcher", selected), warnings.catch_warnings():
            yield

    def begin_epoch(self) -> None:
        """The data of an epoch begins."""
        self._random = ReadingStream()
        if self._resumed_beginning is not None:
            self._resumed_beginning.restore()
            for generator, state in zip(self._own_generators(), self._generators_began, strict=False):
                generator.set_state(state)
            if self._resumed_position is None or not self._resumed_position["batches"]:
                # A new epoch: its data draws first, and the training goes on from there.
                self._resumed_now = None
            else:
                # Lightning sets the epoch of samplers later, and the batches are skipped before.
                for loader in self._loaders():
                    _set_sampler_epoch(loader, self.epoch)
        self.began_with = HostRandom.now()
        self._generators_began = [generator.get_state() for generator in self._own_generators()]
        epoch = self._resumed_epoch if self._resumed_epoch is not None else self.epoch
        self._resumed_epoch = None
        for loader in self._loaders():
            renew_workers(loader, epoch)

    def batches_done(self) -> int:
        """How many of its first batches are to be skipped: they have the samples that a checkpoint's epoch had seen.

        Raises:
            CheckpointError: no batch of now begins where the epoch of the checkpoint was left.
        """
        position = self._resumed_position
        if position is None:
            return 0
        units, number = self._units(), int(position["batches"])
        # Checkpoints of version 0.1 have no units.
        saved = [BatchUnit.of_saved(unit) for unit in position["units"]] if "units" in position else units
        if units == saved or not number:
            batches = number
        elif len(units) == len(saved) == 1:
            batches = units[0].batches(number, saved[0])
        else:
            raise CheckpointError(
                f"The checkpoint was saved after {number} batches of its epoch, of several loaders, and the batches of "
                "now are others: resume with the batch sizes of then, or from a checkpoint of the end of an epoch"
            )
        if batches and position.get("random") is not None:
            self._random.go_on(position["random"], batches, skips=False, same=units == saved)
        return batches

    def has_begun(self, batches: int, length: int | None) -> None:
        """The data of an epoch has begun: after a resume its loop counts batches of now, not those of the checkpoint.

        Args:
            batches: how many were skipped.
            length: of the epoch; None if it is not known.
        """
        if self._resumed_beginning is None:
            return
        # A batch that was read and not trained counts from its second reading on: random numbers depend on that.
        progress: Any = self._trainer.fit_loop.epoch_loop.batch_progress
        for read in (progress.total, progress.current):
            read.ready = read.started = read.processed
        # Without a position the epoch had ended.
        position, self._resumed_beginning, self._resumed_position = self._resumed_position, None, None
        done = length if position is None else batches
        counts = progress.current
        if done is None or not counts.ready:
            return
        changed = done - counts.ready
        for name in ("ready", "started", "processed", "completed"):
            setattr(counts, name, getattr(counts, name) + changed)

    def read(self, read: Callable[[], Any]) -> Any:
        """The next batch.

        Args:
            read: reads it.
        """
        with self._random.reading(self.epoch):
            return read()

    def _units(self) -> list[BatchUnit]:
        return [BatchUnit.of(loader) for loader in self._loaders()]

    def _loaders(self) -> list[Any]:
        loop: Any = self._trainer.fit_loop
        return list(loop._combined_loader.flattened) if loop._combined_loader is not None else []

    def _own_generators(self) -> list[torch.Generator]:
        return [generator for loader in self._loaders() for generator in generators_of(loader)]


class _TrackedFetcher(_PrefetchDataFetcher):
    """Lightning's fetcher, whose batches can be read a second time, and which skips used batches."""

    data: DataPosition

    def __iter__(self) -> _TrackedFetcher:
        self.data.begin_epoch()
        super().__iter__()
        batches = self.data.batches_done()
        for number in range(batches):
            try:
                self.data.read(super().__next__)
            except StopIteration:
                raise CheckpointError(
                    f"the checkpoint was taken after {batches} batches of its epoch, and the training data has only "
                    f"{number}: it is other data than then"
                ) from None
        self.data.has_begun(batches, self.length)
        # Lightning adds the skipped batches itself.
        self.fetched -= batches
        return self

    def __next__(self) -> Any:
        self.data.before_batch()
        return self.data.read(super().__next__)


def exact_state(seed: int, data: DataPosition) -> dict[str, Any]:
    """The state of random numbers and training data now, as plain values and host tensors.

    Args:
        seed: of the run.
        data: of the run.
    """
    runtime, position = get_runtime(), data.position()
    reading = None if position is None else position["random"]
    state = {
        "seed": seed,
        "device": runtime.random.seed(),
        "algorithm": runtime.random.algorithm(),
        # Before a batch was read that is read again.
        "host": HostRandom.now().to_save() if reading is None else reading["now"],
        "epoch": data.next_epoch,
        "generators": data.generators(),
    }
    return state if position is None else {**state, "data": position}


def restore_exact_state(state: Mapping[str, Any], data: DataPosition) -> None:
    """Goes on from what `exact_state` returned, but for the run's seed, which is the caller's.

    Args:
        state: as saved; older checkpoints lack some of the entries.
        data: of the run.
    """
    get_runtime().random.set_seed(int(state["device"]))
    if "algorithm" in state:
        resume_random_algorithm(state["algorithm"])
    if "host" in state:
        host = HostRandom.of_saved(state["host"])
        data.resume(state.get("data"), host, state.get("epoch"), state.get("generators", ()))
