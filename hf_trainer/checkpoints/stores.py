"""`CheckpointStores`: the `CheckpointStore` of each folder that a trainer saves to or loads from."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from typing import Any

import transformers
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_trainer.options import TrainerOptions
from xla_adapters.checkpoint import Checkpoint, CheckpointStore, Watchdog, differences, warn_of_differences
from xla_adapters.config import REMOVED_OPTIONS

PREFIX = f"{PREFIX_CHECKPOINT_DIR}-"
_DISTRIBUTIONS = ("transformers", "accelerate")
# Training arguments that influence the losses. Listed one by one, so that no token, path or name of a host gets into
# a manifest.
SETTINGS = (
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "bf16",
    "data_seed",
    "dataloader_drop_last",
    "full_determinism",
    "gradient_accumulation_steps",
    "ignore_data_skip",
    "label_smoothing_factor",
    "learning_rate",
    "lr_scheduler_type",
    "max_grad_norm",
    "max_steps",
    "neftune_noise_alpha",
    "num_train_epochs",
    "optim",
    "optim_args",
    "per_device_train_batch_size",
    "seed",
    "train_sampling_strategy",
    "warmup_steps",
    "weight_decay",
)


class CheckpointStores:
    """Makes the `CheckpointStore` of a folder, with the rotation and the manifest that the trainer's options ask for.

    Args:
        trainer: its arguments are written into manifests.
        options: the XLA options.
        devices: how many train together.
        random_algorithm: that the device uses.
    """

    def __init__(
        self, trainer: transformers.Trainer, options: TrainerOptions, devices: int, random_algorithm: str
    ) -> None:
        self._trainer = trainer
        self._options = options
        self._devices = devices
        self._random_algorithm = random_algorithm

    @property
    def are_used(self) -> bool:
        """Whether checkpoints are committed and verified. Several processes would each commit a draft of their own."""
        return self._options.safe_checkpoints and self._trainer.args.world_size == 1

    @property
    def asynchronous(self) -> bool:
        """Whether checkpoints are written in the background."""
        return self._options.checkpoint.asynchronous

    @property
    def settings(self) -> dict[str, Any]:
        """What a manifest records of the options, to compare with when a run resumes."""
        options = self._options
        values = {name: getattr(self._trainer.args, name) for name in SETTINGS}
        sharding = options.sharding
        return {
            "arguments": values,
            "xla": {**options.config.of_numbers(), "rng_algorithm": self._random_algorithm},
            "sharding": None if sharding is None else {"scheme": sharding.scheme, "mesh_shape": sharding.mesh_shape},
        }

    def of(self, root: str) -> CheckpointStore:
        """The store of a folder, to load from. It deletes nothing."""
        return self._make(root)

    def saving(self, root: str, name: str, best: str | None) -> CheckpointStore:
        """The store of a folder, to save to. It deletes old checkpoints by `keep_last`, or by `save_total_limit`.

        Args:
            root: the folder of the checkpoints.
            name: of the checkpoint to be saved.
            best: path of the best checkpoint, which is kept.
        """
        config, limit = self._options.checkpoint, self._trainer.args.save_total_limit
        if config.keep_last is not None:
            protected = () if best is None else (os.path.basename(best),)
            return self._make(root, keep_last=config.keep_last, keep_every=config.keep_every, protected=protected)
        if limit is not None and limit > 0:
            return self._make(root, keep_last=1, protected=_kept_by_limit(self._bare(root), name, limit, best))
        return self._make(root)

    def compare(self, checkpoint: Checkpoint) -> None:
        """Warns if a checkpoint was saved with other options, versions or devices than those of this run."""
        lines = differences(
            checkpoint.manifest,
            settings=self.settings,
            distributions=_DISTRIBUTIONS,
            world={"processes": 1, "devices": self._devices},
            ignore=[f"xla.{name}" for name in REMOVED_OPTIONS],
        )
        warn_of_differences(checkpoint, lines)

    def _bare(self, root: str) -> CheckpointStore:
        return CheckpointStore(os.path.abspath(root), prefix=PREFIX)

    def _make(
        self,
        root: str,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        protected: Collection[str] = (),
    ) -> CheckpointStore:
        return CheckpointStore(
            os.path.abspath(root),
            prefix=PREFIX,
            keep_last=keep_last,
            keep_every=keep_every,
            protected=protected,
            distributions=_DISTRIBUTIONS,
            devices=self._devices,
            watchdog=Watchdog(self._options.checkpoint.stall_deadline),
        )


def numbered(store: CheckpointStore) -> list[str]:
    """Names of the checkpoints with a manifest that `save_total_limit` counts, oldest first."""
    names = [checkpoint.name for checkpoint in store.checkpoints()]
    return [name for name in names if re.fullmatch(rf"{PREFIX}\d+", name)]


def _kept_by_limit(store: CheckpointStore, saving: str, limit: int, best: str | None) -> set[str]:
    """Names that `save_total_limit` keeps besides the one being saved: the newest, and the best, which counts."""
    others = [name for name in numbered(store) if name != saving]
    kept = os.path.basename(best) if best is not None and os.path.dirname(os.path.abspath(best)) == store.root else None
    removable = [name for name in others if name != kept]
    excess = len(others) + 1 - max(limit, 1 + (kept in others))
    return {checkpoint.name for checkpoint in store.checkpoints()} - set(removable[: max(0, excess)])
