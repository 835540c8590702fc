"""The batch that the sharding of a run is planned with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_strategy.sharding.module_sharding import ModuleSharding
from xla_adapters.data.batches import example_of
from xla_adapters.utils.host_random import host_random_numbers_kept


def prepare_for_run(sharding: ModuleSharding, module: LightningModule) -> None:
    """Plans for the module of a run with an example of the run's batches, and shards its parameters.

    Args:
        sharding: of the strategy.
        module: on the device; its Trainer is set.

    Raises:
        ConfigError: no plan satisfies the options.
    """
    trainer = module.trainer
    # A run that saves no checkpoint saves no plan.
    folder = Path(trainer.default_root_dir) if trainer.checkpoint_callbacks else None
    sharding.prepare(module, lambda: example_batch(trainer), folder)


def example_batch(trainer: Trainer) -> Any:
    """A batch on the host with the shapes of the run's batches: copies of the first sample; None for a data stream.

    Takes no batch from the loaders and no random number, so that the run is the same with it and without.
    """
    source = {
        TrainerFn.FITTING: lambda: trainer.fit_loop._data_source,
        TrainerFn.VALIDATING: lambda: trainer.validate_loop._data_source,
        TrainerFn.TESTING: lambda: trainer.test_loop._data_source,
        TrainerFn.PREDICTING: lambda: trainer.predict_loop._data_source,
    }.get(trainer.state.fn or TrainerFn.FITTING)
    assert source is not None
    with host_random_numbers_kept():
        return _example_of(source().dataloader(), whole=trainer.state.fn == TrainerFn.FITTING)


def _example_of(loaders: Any, *, whole: bool) -> Any:
    """A batch of one loader, or of several: of all of them if `whole` (training), else of the first (evaluation)."""
    if isinstance(loaders, CombinedLoader):
        return _example_of(loaders.iterables, whole=loaders._mode != "sequential")
    if isinstance(loaders, DataLoader):
        return _example_of_loader(loaders)
    if isinstance(loaders, Mapping) and loaders:
        found = {name: _example_of(loader, whole=whole) for name, loader in loaders.items()}
        examples = list(found.values())
        return (None if any(item is None for item in examples) else found) if whole else examples[0]
    if isinstance(loaders, (list, tuple)) and loaders:
        examples = [_example_of(loader, whole=whole) for loader in loaders]
        return (None if any(item is None for item in examples) else examples) if whole else examples[0]
    return None


def _example_of_loader(loader: DataLoader[Any]) -> Any:
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return None if size is None else example_of(loader.dataset, size, loader.collate_fn)
