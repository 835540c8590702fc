"""State that transformers does not save: the losses since the last log, the position in the epoch's data, and (of
TorchTPU, which it does not know) the device's random stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from hf_trainer import torch_tpu
from hf_trainer.loader import DeviceLoader
from xla_adapters import get_runtime
from xla_adapters.runtime.transfers import uploading

EXACT_RESUME = "xla_adapters.trainer.pt"


def save_rest(trainer: transformers.Trainer, folder: Path) -> None:
    """Writes this state of a training into the folder of a checkpoint, as `EXACT_RESUME`."""
    logged, total = trainer._globalstep_last_logged, 0.0
    if logged != trainer.state.global_step:
        (loss,) = get_runtime().transfers.to_host([trainer._tr_loss])
        total = loss.item()
    loader = trainer.callback_handler.train_dataloader
    data = loader.position.state() if isinstance(loader, DeviceLoader) else None
    rest = {"loss_sum": total, "logged_at_step": logged, "data": data}
    if torch_tpu.is_used():
        rest["device_random"] = get_runtime().random.seed()
    torch.save(rest, folder / EXACT_RESUME)


def restore_rest(trainer: transformers.Trainer, folder: Path) -> None:
    """Restores the state of `save_rest` when a training begins; does nothing if the checkpoint has none."""
    path = folder / EXACT_RESUME
    if not path.is_file():
        return
    saved: dict[str, Any] = torch.load(path, weights_only=True)
    loader = trainer.callback_handler.train_dataloader
    if saved["data"] is not None and isinstance(loader, DeviceLoader):
        loader.position.resume(saved["data"])
    if "device_random" in saved and torch_tpu.is_used():
        get_runtime().random.set_seed(saved["device_random"])
    if saved["logged_at_step"] == trainer.state.global_step:
        return
    with uploading():
        trainer._tr_loss = torch.tensor([saved["loss_sum"]], dtype=torch.float32).to(trainer.args.device)
    trainer._globalstep_last_logged = saved["logged_at_step"]
    # `train_loss`, logged at the end, is the mean over the steps of this run only.
    trainer._total_loss_scalar -= saved["loss_sum"]
