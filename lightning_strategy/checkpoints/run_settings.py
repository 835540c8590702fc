"""The settings that decide the losses of a run: saved in manifests, and compared when a run resumes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.optim import Optimizer

from lightning_strategy.checkpoints.io import DISTRIBUTIONS
from lightning_strategy.sharding.module_sharding import ModuleSharding
from xla_adapters import XLAConfig, get_runtime
from xla_adapters.checkpoint import Checkpoint, LocalStorage, differences, read_manifest, warn_of_differences
from xla_adapters.config import REMOVED_OPTIONS

# Attributes of the Trainer. The length of the training is not compared: a resumed run is often a longer one.
_TRAINER = (
    "accumulate_grad_batches",
    "gradient_clip_algorithm",
    "gradient_clip_val",
    "limit_train_batches",
    "overfit_batches",
    "precision",
    "reload_dataloaders_every_n_epochs",
)


def settings_of(trainer: Trainer, config: XLAConfig, sharding: ModuleSharding | None) -> dict[str, Any]:
    """The settings of a run, as plain values for a manifest.

    Args:
        trainer: of the run; its optimizers exist.
        config: the XLA options.
        sharding: of the strategy, if it shards.
    """
    loop: Any = trainer.fit_loop
    values = {name: getattr(trainer if hasattr(trainer, name) else loop, name) for name in _TRAINER}
    optimizers = {str(index): _described(optimizer) for index, optimizer in enumerate(trainer.optimizers)}
    options = config.of_numbers()
    # The algorithm in use is saved beside the random numbers, and resumed with them.
    del options["rng_algorithm"]
    plan = None
    if sharding is not None:
        plan = {"scheme": sharding.config.scheme, "mesh_shape": sharding.config.mesh_shape}
    return {"trainer": values, "optimizers": optimizers, "xla": options, "sharding": plan}


def _described(optimizer: Optimizer) -> dict[str, Any]:
    # A learning rate may be a tensor on the device, and reading it would cost a transfer.
    plain = {name: value for name, value in optimizer.defaults.items() if not isinstance(value, torch.Tensor)}
    return {"class": type(optimizer).__name__, **plain}


def devices_of(sharding: ModuleSharding | None) -> int:
    """How many devices a run uses."""
    return get_runtime().device.count() if sharding is not None else 1


def show_differences(path: Any, settings: Mapping[str, Any] | None, sharding: ModuleSharding | None) -> None:
    """Warns with a diff if the run that wrote a checkpoint had other versions, settings or devices than this one.

    Args:
        path: of the checkpoint; nothing is compared if it is remote, or has no manifest.
        settings: of this run; not compared if None, or if the manifest has none.
        sharding: of this run.
    """
    if "://" in os.fspath(path):
        return
    real = os.path.realpath(path)
    manifest = read_manifest(LocalStorage(), real)
    if manifest is None:
        return
    world = {"processes": 1, "devices": devices_of(sharding)}
    compared = settings if manifest.settings else None
    removed = [f"xla.{name}" for name in REMOVED_OPTIONS]
    lines = differences(manifest, settings=compared, distributions=DISTRIBUTIONS, world=world, ignore=removed)
    warn_of_differences(Checkpoint(path=real, manifest=manifest), lines)
