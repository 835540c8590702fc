"""`ModelSharding`: the sharding of one trainer's model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_trainer.framework_patches import as_if_compiling
from hf_trainer.placement import model_of
from xla_adapters.data.batches import example_of
from xla_adapters.errors import ConfigError
from xla_adapters.sharding import Sharder, ShardingPlan, accept_placements
from xla_adapters.sharding.state import names_of_updated


class ModelSharding:
    """Plans the sharding when the first run begins, and shards the model again whenever it was loaded or replaced.

    Args:
        trainer: the trainer.
        sharder: makes and applies the plan; None on one device, where most methods do nothing.
    """

    def __init__(self, trainer: transformers.Trainer, sharder: Sharder | None) -> None:
        self._trainer = trainer
        self._sharder = sharder
        self._applied = ExitStack()
        self._applied_to: torch.nn.Module | None = None
        # Names of parameters that the user's model had as DTensors.
        self._former_dtensors: list[str] = []

    @property
    def plan(self) -> ShardingPlan:
        """How the model is sharded.

        Raises:
            ConfigError: it is not sharded, or no run has begun yet.
        """
        if self._sharder is None:
            raise ConfigError("this trainer does not shard; create it with auto_sharding=True or sharding=")
        return self._sharder.plan

    def summary(self) -> str:
        """How the model is sharded, in words; empty if it is not."""
        return "" if self._sharder is None else self._sharder.summary

    @property
    def devices(self) -> int:
        """How many devices train together."""
        return 1 if self._sharder is None else self._sharder.devices

    @property
    def saves_shards(self) -> bool:
        """Whether checkpoints are written shard by shard (`ShardingConfig(checkpoints="sharded")`)."""
        return self._sharder is not None and self._sharder.config.checkpoints == "sharded"

    def accept_dtensors(self, model: torch.nn.Module) -> None:
        """Takes over the placements of the user's DTensors, before the model moves to the device."""
        if self._sharder is not None:
            self._former_dtensors += accept_placements(model)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Around a run: parameters are sharded, and intermediate values constrained, by the plan."""
        if self._sharder is None:
            yield
            return
        try:
            with self._applied:
                self.apply()
                yield
        finally:
            self._applied_to = None

    def apply(self) -> None:
        """Shards the model: at the start of a run, and after its weights were loaded."""
        if self._sharder is None:
            return
        trainer, model = self._trainer, model_of(self._trainer)
        writes = trainer.args.output_dir is not None and trainer.args.should_save
        folder = Path(trainer.args.output_dir) if writes else None  # type: ignore[arg-type]
        self._sharder.prepare(model, self._example_batch, around=as_if_compiling, folder=folder)
        if self._applied_to is not model:
            self._applied.close()
            self._applied.enter_context(self._sharder.holding(model))
            self._applied_to = model

    def training_begins(self) -> None:
        """Shards the model of a training, whose weights may come from a checkpoint.

        Raises:
            ConfigError: batches cannot be split over the devices.
        """
        trainer = self._trainer
        if self._former_dtensors and isinstance(trainer.optimizer, torch.optim.Optimizer):
            # The user made it before the trainer, from the DTensors.
            names_of_updated(model_of(trainer), trainer.optimizer)
        if self._sharder is not None:
            self.apply()
            self._sharder.check_batch_size(trainer.args.train_batch_size, "per_device_train_batch_size")

    def _example_batch(self) -> Any:
        """A batch like those of the training, on the host. Neither data nor random numbers are used up."""
        trainer = self._trainer
        dataset: Any = trainer.train_dataset if trainer.train_dataset is not None else trainer.eval_dataset
        if isinstance(dataset, dict):
            dataset = next(iter(dataset.values()))
        collate: Callable[[Any], Any] = trainer._get_collator_with_removed_columns(trainer.data_collator, "training")
        return example_of(dataset, trainer.args.train_batch_size, lambda samples: dict(collate(samples)))
