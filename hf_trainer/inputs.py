"""`Inputs`: moves batches to the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from hf_trainer.user_code import overridden
from xla_adapters import get_runtime
from xla_adapters.runtime.transfers import uploading
from xla_adapters.sharding import Sharder
from xla_adapters.utils.nested_values import replaced


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
        return replaced(inputs, self.prepare)

    def item_count(self, batch_samples: list[Any], device: torch.device) -> Any:
        """As `Trainer._get_num_items_in_batch`, counted where the labels are. The step moves the count later."""
        on_host = batch_samples and not any(
            isinstance(value, torch.Tensor) and get_runtime().device.owns(value) for value in _values(batch_samples[0])
        )
        if on_host and self._trainer.args.world_size == 1:
            device = torch.device("cpu")
        return self._base._get_num_items_in_batch(batch_samples, device)

    def item_count_on_device(self, items: Any) -> Any:
        """The count on the device, if it is a tensor."""
        if not isinstance(items, torch.Tensor):
            return items
        with uploading():
            return items.to(self._trainer.args.device)


def _values(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        yield from batch.values()
    elif isinstance(batch, (list, tuple)):
        yield from batch
