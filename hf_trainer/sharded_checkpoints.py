"""Checkpoints in parts: weights written one at a time, the optimizer's state as each device holds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.trainer import SCHEDULER_NAME

from hf_trainer.deferred_weights import deferred_state_dict, writing_deferred_weights
from hf_trainer.trainer_hooks import TrainerHooks
from xla_adapters.sharding.state import load_optimizer, optimizer_state, save_state

# transformers' own Trainer finds an optimizer's state by this name, and refuses this one aloud.
OPTIMIZER_FOLDER = "optimizer"


class ShardedCheckpointHooks(TrainerHooks):
    """With `ShardingConfig(checkpoints="sharded")` the state never lies on the host as a whole.

    Weights are safetensors files as ever, which `from_pretrained` reads. Models that are no `PreTrainedModel` (adapters
    of PEFT, modules of one's own) have theirs saved as without the option.
    """

    @property
    def _saves_parts(self) -> bool:
        return self._sharder is not None and self._sharder.config.checkpoints == "sharded"

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As `Trainer.save_model`."""
        model = self._live_model
        if not self._saves_parts or not isinstance(model, PreTrainedModel):
            super().save_model(output_dir, _internal_call)
            return
        self._backend.flush()
        with writing_deferred_weights():
            self._save(output_dir, deferred_state_dict(model))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._saves_parts:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state = optimizer_state(self._live_model, self._own_optimizer)
        save_state({OPTIMIZER_FOLDER: state}, Path(output_dir) / OPTIMIZER_FOLDER)
        scheduler: Any = self.lr_scheduler
        torch.save(scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / OPTIMIZER_FOLDER).is_dir():
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        # Whoever wrote it, on however many devices, with the option or without.
        load_optimizer(self._live_model, self._own_optimizer, Path(checkpoint) / OPTIMIZER_FOLDER)
        scheduler: Any = self.lr_scheduler
        scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))

    @property
    def _own_optimizer(self) -> torch.optim.Optimizer:
        """Without the wrappers of accelerate."""
        optimizer: Any = self.optimizer
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        assert isinstance(optimizer, torch.optim.Optimizer)
        return optimizer
