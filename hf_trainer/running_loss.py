"""The mean of the losses since the last log, which transformers forgets between two runs."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from hf_trainer.trainer_hooks import TrainerHooks
from xla_adapters.transfers import uploading

RUNNING_LOSS = "xla_adapters.running_loss.json"


def save_running_loss(trainer: TrainerHooks, folder: Path) -> None:
    """Writes the sum of the losses since the last log, and when that was."""
    logged, total = trainer._globalstep_last_logged, 0.0
    if logged != trainer.state.global_step:
        (loss,) = trainer._backend.to_host([trainer._tr_loss])
        total = loss.item()
    (folder / RUNNING_LOSS).write_text(json.dumps({"sum": total, "logged_at_step": logged}))


def restore_running_loss(trainer: TrainerHooks, folder: Path) -> None:
    """Goes on from what `save_running_loss` wrote, if it did."""
    path = folder / RUNNING_LOSS
    if not path.is_file():
        return
    saved = json.loads(path.read_text())
    if saved["logged_at_step"] == trainer.state.global_step:
        return
    with uploading():
        trainer._tr_loss = torch.tensor([saved["sum"]], dtype=torch.float32).to(trainer.args.device)
    trainer._globalstep_last_logged = saved["logged_at_step"]
    # The mean over this run, which is told at its end, is of the steps of this run.
    trainer._total_loss_scalar -= saved["sum"]
