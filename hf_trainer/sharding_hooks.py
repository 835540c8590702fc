"""Sharding hooks: the plan is made when the first run begins, and what a run loads is cut again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hf_trainer.framework_patches import as_if_compiling
from hf_trainer.trainer_hooks import TrainerHooks
from xla_adapters.batches import example_of
from xla_adapters.errors import ConfigError
from xla_adapters.sharding.dtensor import accept_placements
from xla_adapters.sharding.plan import ShardingPlan
from xla_adapters.sharding.sharder import Sharder
from xla_adapters.sharding.state import names_of_updated


class ShardingHooks(TrainerHooks):
    """Where the Trainer's course meets the sharder."""

    _held_model: Any = None

    @property
    def sharding_plan(self) -> ShardingPlan:
        """How the model is sharded.

        Raises:
            ConfigError: it is not, or no run has begun yet.
        """
        if self._sharder is None:
            raise ConfigError("this trainer does not shard; create it with auto_sharding=True or sharding=")
        return self._sharder.plan

    @contextmanager
    def _sharded(self) -> Iterator[None]:
        """A run: the parameters are cut, intermediate values held to the plan."""
        if self._sharder is None:
            yield
            return
        with self._held:
            self._hold_model(self._sharder)
            yield
        self._held_model = None

    def _hold_model(self, sharder: Sharder) -> None:
        model = self._live_model
        folder = Path(self.args.output_dir) if self.args.output_dir is not None and self.args.should_save else None
        sharder.prepare(model, self._example_batch, around=as_if_compiling, folder=folder)
        if self._held_model is not model:
            self._held.close()
            self._held.enter_context(sharder.holding(model))
            self._held_model = model

    def weights_are_loaded(self) -> None:
        """A training begins, with the weights of a checkpoint or a new model perhaps (called by the first callback)."""
        if self._placed and isinstance(self.optimizer, torch.optim.Optimizer):
            # One that the user made before has the DTensors still.
            names_of_updated(self._live_model, self.optimizer)
        if self._sharder is not None:
            self._hold_model(self._sharder)
            self._sharder.check_batch_size(self.args.train_batch_size, "per_device_train_batch_size")

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if self._sharder is not None:
            self._hold_model(self._sharder)

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        if self._sharder is not None:
            self._placed = [*self._placed, *accept_placements(model)]
        super()._move_model_to_device(model, device)

    def _example_batch(self) -> Any:
        """A batch like the training's, on the host; neither the data nor the random numbers go on by it."""
        dataset: Any = self.train_dataset if self.train_dataset is not None else self.eval_dataset
        if isinstance(dataset, dict):
            dataset = next(iter(dataset.values()))
        collate: Callable[[Any], Any] = self._get_collator_with_removed_columns(self.data_collator, "training")
        return example_of(dataset, self.args.train_batch_size, lambda samples: dict(collate(samples)))
