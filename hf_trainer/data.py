"""The batches of a trainer: how they are read, counted, and moved to the device."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
import transformers.trainer
from accelerate import DistributedType, PartialState
from accelerate import skip_first_batches as skip_by_sampler
from accelerate.utils import send_to_device
from transformers.trainer import logger
from transformers.trainer_utils import has_length

from hf_trainer.replay import overridden
from xla_adapters import get_runtime
from xla_adapters.data.position import BatchUnit, ReadingStream, generators_of, renew_workers
from xla_adapters.runtime.transfers import uploading
from xla_adapters.sharding import Sharder
from xla_adapters.utils.host_random import HostRandom
from xla_adapters.utils.nested_values import replaced
from xla_adapters.utils.patching import replaced as replaced_attribute


class DataPosition:
    """The position in an epoch's data, and the random state that the order of the data depends on.

    Saved in a checkpoint, it lets a resumed training read the rest of the epoch as the first run would have.

    Attributes:
        taken: how many batches of the epoch were read.
        trained: how many of these the updates so far have used.
        goes_on_in_epoch: whether the epoch under way goes on with the random numbers of a checkpoint.
    """

    def __init__(self) -> None:
        self.taken = self.trained = 0
        self.goes_on_in_epoch = False
        self._random = ReadingStream()
        self._began_with: HostRandom | None = None
        self._generators: list[torch.Generator] = []
        self._generators_began: list[torch.Tensor] = []
        self._epoch = self._offset = 0
        self._saved: Mapping[str, Any] | None = None
        self._goes_on = False

    def state(self, loader: DeviceLoader) -> dict[str, Any] | None:
        """The state to save in a checkpoint; None before the first batch.

        Args:
            loader: of the whole epoch.
        """
        random = self._random.to_save(self.trained)
        if self._began_with is None or random is None:
            return None
        return {
            # Those of an update that has begun are read again.
            "taken": self.trained,
            "epoch": self._epoch,
            "ended": has_length(loader) and self.trained >= len(loader),
            "unit": loader.unit().to_save(),
            "began_with": self._began_with.to_save(),
            "random": random,
            "generators_began": self._generators_began,
            "generators_now": [generator.get_state() for generator in self._generators],
        }

    def resume(self, saved: Mapping[str, Any]) -> None:
        """The next epoch continues the epoch of a checkpoint, or is the one after it.

        Args:
            saved: the `state()` in the checkpoint.
        """
        self._saved = saved

    def go_on(self, loader: DeviceLoader, batches: int) -> tuple[int, bool]:
        """The next epoch begins in its middle.

        Args:
            loader: of the whole epoch.
            batches: how many to skip, as transformers counts them. For a loader without a length it counts all
                epochs as one.

        Returns:
            How many batches to skip, and whether they must be read nevertheless. A sampler can skip batches without
            reading them, but then their random numbers are not drawn, here or in a worker.

        Raises:
            CheckpointError: no batch of now begins where the epoch of the checkpoint was left.
        """
        self._goes_on, self._random, self.goes_on_in_epoch = True, ReadingStream(), False
        if self._saved is None:
            return batches, False
        taken, unit = int(self._saved["taken"]), loader.unit()
        saved_unit, random = saved_unit_of(self._saved, unit), self._saved.get("random")
        batches = unit.batches(taken, saved_unit)
        # Checkpoints of version 0.1 have no state of the reading.
        reads = bool(loader.num_workers or (self._saved if random is None else random)["draws"])
        if random is not None:
            self._random.go_on(random, batches, skips=not reads, same=unit == saved_unit)
            self.goes_on_in_epoch = True
        return batches, reads

    def epoch(self, number: int) -> int:
        """The index of the epoch.

        Args:
            number: its index in transformers, which counts from 0 again when it resumes a run without a length.
        """
        if self._goes_on and self._saved is not None:
            self._offset = self._saved["epoch"] - number
        self._epoch = number + self._offset
        return self._epoch

    def begin(self, loader: Any, skipped: int) -> None:
        """An epoch's data begins.

        Args:
            loader: reads the data.
            skipped: how many batches its sampler skips.
        """
        self._generators = generators_of(loader)
        if self._saved is not None:
            if self._goes_on:
                HostRandom.of_saved(self._saved["began_with"]).restore()
            states = self._saved["generators_began" if self._goes_on else "generators_now"]
            for generator, state in zip(self._generators, states, strict=False):
                generator.set_state(state)
        if not self._goes_on:
            self._random, self.goes_on_in_epoch = ReadingStream(), False
        self._goes_on, self._saved, self.taken, self.trained = False, None, skipped, skipped
        self._began_with = HostRandom.now()
        self._generators_began = [generator.get_state() for generator in self._generators]
        renew_workers(getattr(loader, "base_dataloader", loader), self._epoch)

    def read(self, batches: Iterator[Any]) -> Any:
        """The next batch."""
        with self._random.reading(self._epoch):
            return next(batches)


def saved_unit_of(saved: Mapping[str, Any], now: BatchUnit) -> BatchUnit:
    """The unit of a saved position; that of now in checkpoints of version 0.1, which have none."""
    return BatchUnit.of_saved(saved["unit"]) if "unit" in saved else now


class DeviceLoader:
    """Replaces accelerate's `MpDeviceLoaderWrapper`.

    accelerate's class reads the dataset in a background thread, which swallows the dataset's exceptions (the epoch
    ends early and looks normal), syncs the device at each batch, and keeps the last-batch flag in thread-local state
    where the evaluation loop does not see it. This class reads batches in the thread that trains, and leaves those for
    transformers' loops on the host; the step moves them to the device while it is traced. Other loops get them on the
    device. Use `dataloader_num_workers` to read in parallel.

    Args:
        dataloader: accelerate's prepared loader.
        device: the device on which the batches will be used.
        position: of another loader of the same data, to continue from; None for the begin.
        skip: how many batches to read without yielding them.
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
            # Pinned memory needs CUDA; torch would warn in each epoch.
            loader.pin_memory = False

    def __iter__(self) -> Iterator[Any]:
        if sys._getframe(1).f_globals.get("__name__") == transformers.trainer.__name__:
            return self._batches()
        return map(self._on_device, self._batches())

    def _on_device(self, batch: Any) -> Any:
        with uploading():
            return send_to_device(batch, self.device)

    def _batches(self) -> Iterator[Any]:
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
            else:
                self.position.trained = self.position.taken

    def unit(self) -> BatchUnit:
        """What a number of batches of this loader means."""
        return BatchUnit.of(self.dataloader, PartialState().num_processes)

    def set_epoch(self, epoch: int) -> None:
        """As `set_epoch` of accelerate's loader."""
        self.dataloader.set_epoch(self.position.epoch(epoch))

    def __len__(self) -> int:
        return len(self.dataloader)

    def __getattr__(self, name: str) -> Any:
        if name == "dataloader":
            raise AttributeError(name)
        return getattr(self.dataloader, name)


def skip_first_batches(loader: Any, batches: int = 0) -> Any:
    """Replaces accelerate's function: a loader of the rest of an epoch, with the same samples in the same order.

    Args:
        loader: of the whole epoch.
        batches: how many to skip.
    """
    if not isinstance(loader, DeviceLoader):
        return skip_by_sampler(loader, batches)
    batches, reads = loader.position.go_on(loader, batches)
    if reads:
        return DeviceLoader(loader.dataloader, loader.device, position=loader.position, skip=batches)
    if PartialState().distributed_type == DistributedType.XLA:
        # It takes the loader apart itself, and makes another one of this class.
        rest = skip_by_sampler(loader, batches)
    else:
        rest = DeviceLoader(skip_by_sampler(loader.dataloader, batches), loader.device)
    rest.position, rest.skipped = loader.position, batches
    return rest


class Inputs:
    """Moves the batches of one trainer to the device, and shards them there.

    Args:
        trainer: the trainer.
        base: the methods that the mixin overrides.
        sharder: shards batches; None on one device.
    """

    def __init__(self, trainer: transformers.Trainer, base: Any, sharder: Sharder | None) -> None:
        self._trainer = trainer
        self._base = base
        self._sharder = sharder
        self._on_host = False
        # The ranks whose items are counted together; None counts those of this process.
        self._ranks = get_runtime().device.ranks

    @contextmanager
    def counting_alone(self) -> Iterator[None]:
        """Until the exit, a batch's items are those of this rank: in an evaluation each rank has losses of its own."""
        before, self._ranks = self._ranks, None
        try:
            yield
        finally:
            self._ranks = before

    @contextmanager
    def staying_on_host(self, stay: bool) -> Iterator[None]:
        """Whether `prepare` leaves batches on the host, until the exit."""
        before, self._on_host = self._on_host, stay
        try:
            yield
        finally:
            self._on_host = before

    def prepare(self, data: Any) -> Any:
        """As `Trainer._prepare_input`: a batch, or a part of one, on the device."""
        if self._on_host:
            return data
        with uploading():
            prepared = self._base._prepare_input(data)
        if self._sharder is not None and isinstance(prepared, torch.Tensor):
            self._sharder.place_batch(prepared)
        return prepared

    def before_step(self, inputs: Any) -> Any:
        """The batch on the device before the step begins. The step prepares it once more, which then changes nothing.

        Methods that the user overrides are not called: what they do to the batch belongs to the step.
        """
        if overridden(self._trainer, ("_prepare_inputs", "_prepare_input")) is None:
            return self._trainer._prepare_inputs(inputs)
        return self.uploaded(inputs)

    def uploaded(self, inputs: Any) -> Any:
        """A batch that is prepared, on the device."""
        return replaced(inputs, self.prepare)

    def item_count(self, batch_samples: list[Any], device: torch.device) -> Any:
        """As `Trainer._get_num_items_in_batch`, counted where the labels are. The step moves the count later."""
        on_host = batch_samples and not any(
            isinstance(value, torch.Tensor) and get_runtime().device.owns(value) for value in _values(batch_samples[0])
        )
        if on_host and not gathers_on_device(self._trainer):
            device = torch.device("cpu")
        if get_runtime().device.ranks is None:
            return self._base._get_num_items_in_batch(batch_samples, device)
        ranks = self._ranks

        def total(count: torch.Tensor) -> torch.Tensor:
            if ranks is None:
                return count
            return torch.tensor(int(ranks.total(int(count), "the items of the next batches")), device=count.device)

        with replaced_attribute(self._trainer.accelerator, "gather", total):
            return self._base._get_num_items_in_batch(batch_samples, device)

    def item_count_on_device(self, items: Any) -> Any:
        """The count on the device, if it is a tensor."""
        if not isinstance(items, torch.Tensor):
            return items
        with uploading():
            return items.to(self._trainer.args.device)


def gathers_on_device(trainer: transformers.Trainer) -> bool:
    """Whether transformers and accelerate gather the values of other processes on the device, as with torch_xla.

    Ranks do so on the host, where the values come to in one transfer.
    """
    return trainer.args.world_size > 1 and get_runtime().device.ranks is None


def _values(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        yield from batch.values()
    elif isinstance(batch, (list, tuple)):
        yield from batch


def count_tokens(inputs: Mapping[str, Any], model: Any, processing_class: Any, kind: str) -> int:
    """The tokens of a batch. Warns as `Trainer._track_num_input_tokens`, where it cannot tell them.

    Args:
        inputs: the batch, its tensors on the host.
        model: its `main_input_name` names the input to count.
        processing_class: its `pad_token_id` identifies padding if there is no attention mask.
        kind: `"all"` or `"non_padding"`.
    """
    main = inputs.get(getattr(model, "main_input_name", "input_ids"))
    if main is None:
        logger.warning(
            "Tried to track the number of tokens seen, however the current model is not configured properly to know "
            "what item is the input. To fix this, add a `main_input_name` attribute to the model class you are using."
        )
        return 0
    if kind == "non_padding":
        mask = inputs.get("attention_mask")
        if mask is not None:
            return int(mask.sum())
        pad = getattr(processing_class, "pad_token_id", None)
        if pad is not None:
            return int((main != pad).sum())
        logger.warning("Could not determine method to count non-padding tokens, falling back to counting all tokens.")
    return int(main.numel())
