"""`DeviceLoader`: batches for an XLA device, without a thread of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate import skip_first_batches as skip_by_sampler

from xla_adapters.host_random import HostRandom
from xla_adapters.rng import ReadingStream
from xla_adapters.workers import generators_of, renew_workers


class DataPosition:
    """Where in an epoch's data a training is, and what the data depends on, so that it can be read again."""

    def __init__(self) -> None:
        self.taken = 0
        self._random = ReadingStream()
        self._began_with: HostRandom | None = None
        self._generators: list[torch.Generator] = []
        self._generators_began: list[torch.Tensor] = []
        self._epoch = self._offset = 0
        self._saved: Mapping[str, Any] | None = None
        self._goes_on = False

    def state(self) -> dict[str, Any] | None:
        """What to save; None before the first batch."""
        if self._began_with is None or not self._random.has_begun:
            return None
        return {
            "taken": self.taken,
            "epoch": self._epoch,
            "began_with": self._began_with.to_save(),
            "draws": self._random.may_have_drawn,
            "generators_began": self._generators_began,
            "generators_now": [generator.get_state() for generator in self._generators],
        }

    def resume(self, saved: Mapping[str, Any]) -> None:
        """The epoch that is begun next goes on from a checkpoint, or follows it."""
        self._saved = saved

    def go_on(self, batches: int, workers: int) -> tuple[int, bool]:
        """An epoch is begun in its middle.

        Args:
            batches: to be left out, as transformers counts them (without length, as if there were one epoch only).
            workers: of the loader.

        Returns: how many to leave out; whether they must be read all the same. A sampler can leave batches out, but
            then nothing is drawn for them, here or in a worker.
        """
        self._goes_on = True
        if self._saved is None:
            return batches, False
        return self._saved["taken"], bool(workers or self._saved["draws"])

    def epoch(self, number: int) -> int:
        """The epoch that transformers calls `number`, which may have begun to count anew."""
        if self._goes_on and self._saved is not None:
            self._offset = self._saved["epoch"] - number
        self._epoch = number + self._offset
        return self._epoch

    def begin(self, loader: Any, skipped: int) -> None:
        """An epoch's data begins.

        Args:
            loader: that reads it.
            skipped: batches that its sampler leaves out.
        """
        self._generators = generators_of(loader)
        if self._saved is not None:
            if self._goes_on:
                HostRandom.of_saved(self._saved["began_with"]).restore()
            states = self._saved["generators_began" if self._goes_on else "generators_now"]
            for generator, state in zip(self._generators, states, strict=False):
                generator.set_state(state)
        self._goes_on, self._saved, self.taken = False, None, skipped
        self._began_with, self._random = HostRandom.now(), ReadingStream()
        self._generators_began = [generator.get_state() for generator in self._generators]
        renew_workers(getattr(loader, "base_dataloader", loader), self._epoch)

    def read(self, batches: Iterator[Any]) -> Any:
        """The next batch."""
        with self._random.reading(self._epoch):
            return next(batches)


class DeviceLoader:
    """Stands in for accelerate's `MpDeviceLoaderWrapper`.

    That one reads the dataset in a background thread, which swallows the dataset's exceptions (the
    epoch ends early, as if all were well), syncs the device at each batch, and keeps the last-batch
    flag in thread-local state where the evaluation loop does not see it. Here batches are read in
    the thread that trains and stay on the host; the step moves them to the device while it is
    traced. `dataloader_num_workers` parallelises the reading.

    Args:
        dataloader: accelerate's prepared loader.
        device: the device the batches are meant for.
        position: of the data, if another loader of it has one already.
        skip: how many batches are read and left out.
    """

    def __init__(
        self, dataloader: Any, device: torch.device, *, position: DataPosition | None = None, skip: int = 0
    ) -> None:
        self.dataloader = dataloader
        self.device = device
        self.position = position if position is not None else DataPosition()
        self._skip = skip
        self.skipped = 0
        for loader in (dataloader, getattr(dataloader, "base_dataloader", dataloader)):
            # Pinned memory is CUDA's; torch warns at each epoch that there is none.
            loader.pin_memory = False

    def __iter__(self) -> Iterator[Any]:
        self.position.begin(self.dataloader, self.skipped)
        batches = iter(self.dataloader)
        while True:
            try:
                batch = self.position.read(batches)
            except StopIteration:
                return
            self.position.taken += 1
            if self.position.taken > self._skip:
                yield batch

    def set_epoch(self, epoch: int) -> None:
        """As that of accelerate's loader."""
        self.dataloader.set_epoch(self.position.epoch(epoch))

    def __len__(self) -> int:
        return len(self.dataloader)

    def __getattr__(self, name: str) -> Any:
        if name == "dataloader":
            raise AttributeError(name)
        return getattr(self.dataloader, name)


def skip_first_batches(loader: Any, batches: int = 0) -> Any:
    """In place of accelerate's function: an epoch's data from its middle, as the whole epoch would have had it."""
    if not isinstance(loader, DeviceLoader):
        return skip_by_sampler(loader, batches)
    batches, reads = loader.position.go_on(batches, loader.num_workers)
    if reads:
        return DeviceLoader(loader.dataloader, loader.device, position=loader.position, skip=batches)
    rest = skip_by_sampler(loader, batches)
    rest.position, rest.skipped = loader.position, batches
    return rest
