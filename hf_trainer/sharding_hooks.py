"""Sharding hooks: the plan is made when the first run begins, and what a run loads is cut again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hf_trainer.trainer_hooks import TrainerHooks
from xla_adapters import XLAConfig
from xla_adapters.errors import ConfigError, UnsupportedOptionError
from xla_adapters.sharding import ShardingConfig
from xla_adapters.sharding.dtensor import accept_placements
from xla_adapters.sharding.plan import ShardingPlan
from xla_adapters.sharding.sharder import Sharder
from xla_adapters.sharding.state import names_of_updated


def make_sharder(sharding: ShardingConfig, config: XLAConfig) -> Sharder:
    """The sharder for these options.

    Raises:
        UnsupportedOptionError: sharding does not go together with the mode.
    """
    if config.xla_mode == "eager+dynamo":
        raise UnsupportedOptionError(
            "xla_mode='eager+dynamo' and sharding: dynamo's graphs do not know how tensors are cut; use "
            "xla_mode='eager+compile'"
        )
    return Sharder(sharding)


class ShardingHooks(TrainerHooks):
    """Where the Trainer's course meets the sharder."""

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
        model = self._live_model
        self._sharder.prepare(model, self._example_batch)
        with self._sharder.holding(model):
            yield

    def weights_are_loaded(self) -> None:
        """A training begins, from a checkpoint perhaps (called by the first callback)."""
        if self._placed and isinstance(self.optimizer, torch.optim.Optimizer):
            # One that the user made before has the DTensors still.
            names_of_updated(self._live_model, self.optimizer)
        if self._sharder is not None:
            self._sharder.prepare(self._live_model, self._example_batch)
            self._sharder.check_batch_size(self.args.train_batch_size, "per_device_train_batch_size")

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if self._sharder is not None:
            self._sharder.prepare(self._live_model, self._example_batch)

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        if self._sharder is not None:
            self._placed = [*self._placed, *accept_placements(model)]
        super()._move_model_to_device(model, device)

    def _example_batch(self) -> Any:
        """A batch like the training's, on the host; neither the data nor the random numbers go on by it."""
        dataset: Any = self.train_dataset if self.train_dataset is not None else self.eval_dataset
        if isinstance(dataset, dict):
            dataset = next(iter(dataset.values()))
        if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__getitem__"):
            return None
        with _random_numbers_kept():
            samples = [dataset[0]] * self.args.train_batch_size
            collate: Callable[[Any], Any] = self._get_collator_with_removed_columns(self.data_collator, "training")
            return dict(collate(samples))


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
