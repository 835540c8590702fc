"""What transformers forgets between two runs: the mean since the last log, and what the epoch's data began with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hf_trainer.loader import DeviceLoader
from hf_trainer.trainer_hooks import TrainerHooks
from xla_adapters.transfers import uploading

EXACT_RESUME = "xla_adapters.trainer.pt"


def save_rest(trainer: TrainerHooks, folder: Path) -> None:
    """Writes it into a checkpoint."""
    logged, total = trainer._globalstep_last_logged, 0.0
    if logged != trainer.state.global_step:
        (loss,) = trainer._backend.to_host([trainer._tr_loss])
        total = loss.item()
    loader = trainer.callback_handler.train_dataloader
    data = loader.position.state() if isinstance(loader, DeviceLoader) else None
    torch.save({"loss_sum": total, "logged_at_step": logged, "data": data}, folder / EXACT_RESUME)


def restore_rest(trainer: TrainerHooks, folder: Path) -> None:
    """Goes on from what `save_rest` wrote, if it did."""
    path = folder / EXACT_RESUME
    if not path.is_file():
        return
    saved: dict[str, Any] = torch.load(path, weights_only=True)
    loader = trainer.callback_handler.train_dataloader
    if saved["data"] is not None and isinstance(loader, DeviceLoader):
        loader.position.resume(saved["data"])
    if saved["logged_at_step"] == trainer.state.global_step:
        return
    with uploading():
        trainer._tr_loss = torch.tensor([saved["loss_sum"]], dtype=torch.float32).to(trainer.args.device)
    trainer._globalstep_last_logged = saved["logged_at_step"]
    # The mean over this run, which is told at its end, is of the steps of this run.
    trainer._total_loss_scalar -= saved["loss_sum"]
