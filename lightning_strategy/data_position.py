"""Where in the data a fit is: saved, and found again, whatever the loader is made of.

Lightning saves the position of loaders that have a `state_dict` of their own. With any other it begins the epoch's
data anew when it resumes in the middle of one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch.loops.fit_loop
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher

from xla_adapters.errors import CheckpointError
from xla_adapters.host_random import HostRandom
from xla_adapters.patching import replaced
from xla_adapters.rng import ReadingStream
from xla_adapters.workers import generators_of, renew_workers


class DataPosition:
    """Follows the training data of a run.

    Args:
        trainer: whose data.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        # With which the epoch under way began, and with which that of a checkpoint did.
        self.began_with: HostRandom | None = None
        self._begins_with: HostRandom | None = None
        self._batches = 0
        self._resumed_epoch: int | None = None
        self._generators_began: list[torch.Tensor] = []
        # With which the training goes on.
        self._now: HostRandom | None = None

    @property
    def epoch(self) -> int:
        """The number of the epoch under way."""
        loop: Any = self._trainer.fit_loop
        return int(loop.epoch_progress.current.processed)

    def position(self) -> dict[str, Any] | None:
        """What to save in the middle of an epoch; `None` at its end, and for loaders that save it themselves."""
        loop = self._trainer.fit_loop
        if self.began_with is None or loop.epoch_loop._num_ready_batches_reached():
            return None
        return {"batches": loop.epoch_loop.batch_progress.current.ready, "began_with": self.began_with.to_save()}

    @property
    def next_epoch(self) -> int:
        """The number of the epoch whose data comes next: that under way, or at its end the one after it."""
        loop: Any = self._trainer.fit_loop
        return int(loop.epoch_progress.current.ready) if loop.epoch_loop._num_ready_batches_reached() else self.epoch

    def generators(self) -> list[torch.Tensor]:
        """States of the loaders' own generators with which the epoch of `next_epoch` begins."""
        ended = self.began_with is None or self._trainer.fit_loop.epoch_loop._num_ready_batches_reached()
        return [generator.get_state() for generator in self._own_generators()] if ended else self._generators_began

    def resume(
        self,
        position: Mapping[str, Any] | None,
        host: HostRandom,
        epoch: int | None,
        generators: Sequence[torch.Tensor],
    ) -> None:
        """The data goes on from a position that was saved; or, at the end of an epoch, with a new one.

        Args:
            position: as saved.
            host: random numbers at the time of the save.
            epoch: `next_epoch` at that time; Lightning counts it only when the data has begun.
            generators: as saved.
        """
        self._resumed_epoch, self._generators_began = epoch, list(generators)
        self._begins_with, self._batches, self._now = host, 0, host
        if position is not None:
            self._begins_with, self._batches = HostRandom.of_saved(position["began_with"]), int(position["batches"])

    def before_batch(self) -> None:
        """A training batch is about to be computed: from where a resumed run left off, if it is its first."""
        if self._now is not None:
            self._now.restore()
            self._now = None

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Until the exit, what fetches training data is followed."""
        module = lightning.pytorch.loops.fit_loop
        select = vars(module)["_select_data_fetcher"]

        def selected(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
            fetcher = select(trainer, *args, **kwargs)
            followed = trainer is self._trainer and type(fetcher) is _PrefetchDataFetcher
            if followed and not any(isinstance(loader, _Stateful) for loader in self._loaders()):
                fetcher.__class__ = _Followed
                fetcher.data = self
            return fetcher

        with replaced(module, "_select_data_fetcher", selected), warnings.catch_warnings():
            # It is resumable now.
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
            yield

    def begin_epoch(self) -> int:
        """An epoch's data begins; returns how many of its batches are to be left out."""
        batches, self._batches = self._batches, 0
        if self._begins_with is not None:
            self._begins_with.restore()
            self._begins_with = None
            for generator, state in zip(self._own_generators(), self._generators_began, strict=False):
                generator.set_state(state)
            if not batches:
                # The epoch's beginning draws, and then the training.
                self._now = None
            else:
                # Lightning tells samplers the epoch only after this.
                for loader in self._loaders():
                    _set_sampler_epoch(loader, self.epoch)
        self.began_with = HostRandom.now()
        self._generators_began = [generator.get_state() for generator in self._own_generators()]
        epoch = self._resumed_epoch if self._resumed_epoch is not None else self.epoch
        self._resumed_epoch = None
        for loader in self._loaders():
            renew_workers(loader, epoch)
        return batches

    def _loaders(self) -> list[Any]:
        loop: Any = self._trainer.fit_loop
        return list(loop._combined_loader.flattened) if loop._combined_loader is not None else []

    def _own_generators(self) -> list[torch.Generator]:
        return [generator for loader in self._loaders() for generator in generators_of(loader)]


class _Followed(_PrefetchDataFetcher):
    """Lightning's own, with random numbers of its own, begun in the middle if need be."""

    data: DataPosition
    _random: ReadingStream

    def __iter__(self) -> _Followed:
        batches = self.data.begin_epoch()
        self._random = ReadingStream()
        super().__iter__()
        for number in range(batches):
            try:
                next(self)
            except StopIteration:
                raise CheckpointError(
                    f"the checkpoint was taken after {batches} batches of its epoch, and the training data has only "
                    f"{number}: it is other data than then"
                ) from None
        # Lightning counts those that are left out itself.
        self.fetched -= batches
        return self

    def __next__(self) -> Any:
        with self._random.reading(self.data.epoch):
            return super().__next__()
