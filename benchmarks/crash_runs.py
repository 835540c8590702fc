"""The trainings that `benchmarks.crash` and the tests kill: each notes every loss, and goes on from what is there."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import TrainerCallback, TrainingArguments

import hf_trainer
from lightning_strategy import XLAEagerStrategy
from xla_adapters import initialize
from xla_adapters.checkpoint import CheckpointConfig

STEPS, SAVE_EVERY, BATCH, FEATURES, CLASSES = 24, 2, 8, 16, 4
# A save takes about as long as a few steps: many of the kills hit one.
WIDTH = 384
_ROWS = BATCH * STEPS // 2


def network() -> nn.Sequential:
    """With dropout, so that random numbers count."""
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.Tanh(),
        nn.Dropout(0.3),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, CLASSES),
    )


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Two epochs of these are a training."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(_ROWS, FEATURES, generator=generator), torch.randint(CLASSES, (_ROWS,), generator=generator)


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layers(x), labels)}


def note(journal: Path, step: int, loss: float) -> None:
    """Writes a loss down, bit for bit."""
    with journal.open("a") as stream:
        stream.write(f"{step} {loss.hex()}\n")


class _Notes(TrainerCallback):
    def __init__(self, journal: Path) -> None:
        self._journal = journal

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            note(self._journal, state.global_step, logs["loss"])


def _arguments(folder: Path, **options: Any) -> TrainingArguments:
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": SAVE_EVERY,
        "save_total_limit": 2,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "optim": "adamw_torch",
    }
    return TrainingArguments(**{**values, **options})


def _trainer(folder: Path, journal: Path, make: Callable[..., Any], **options: Any) -> Any:
    torch.manual_seed(7)
    xs, labels = rows()
    data = [{"x": x, "labels": label} for x, label in zip(xs, labels, strict=True)]
    return make(model=_Network(), args=_arguments(folder, **options), train_dataset=data, callbacks=[_Notes(journal)])


def huggingface(folder: Path, journal: Path, *, asynchronous: bool, path: str | None = None) -> None:
    """`hf_trainer.Trainer`."""
    initialize()
    make = partial(hf_trainer.Trainer, checkpoint=CheckpointConfig(asynchronous=asynchronous))
    trainer = _trainer(folder, journal, make)
    trainer.train(resume_from_checkpoint=path or any(folder.glob("checkpoint-*")))


def stock_huggingface(folder: Path, journal: Path, *, path: str | None = None) -> None:
    """`transformers.Trainer` on the plain CPU."""
    for name, module in list(sys.modules.items()):
        # With torch_xla installed it would train on XLA, where its resume is not exact.
        if name.partition(".")[0] in ("transformers", "accelerate") and "is_torch_xla_available" in vars(module):
            vars(module)["is_torch_xla_available"] = lambda *args, **kwargs: False
    trainer = _trainer(folder, journal, transformers.Trainer, use_cpu=True)
    trainer.train(resume_from_checkpoint=path or any(folder.glob("checkpoint-*")))


class _Module(L.LightningModule):
    def __init__(self, journal: Path) -> None:
        super().__init__()
        self.layers, self._journal = network(), journal

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        xs, labels = batch
        return nn.functional.cross_entropy(self.layers(xs), labels)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        note(self._journal, self.trainer.global_step, outputs["loss"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def lightning(folder: Path, journal: Path, *, strategy: Callable[[], Any] | None, path: str | None = None) -> None:
    """Lightning's Trainer, with a strategy of ours; or on the plain CPU, if `strategy` is None."""
    if strategy is not None:
        initialize()
    L.seed_everything(7, verbose=False)
    saves = ModelCheckpoint(
        dirpath=folder, every_n_train_steps=SAVE_EVERY, save_last=True, save_top_k=1, enable_version_counter=False
    )
    trainer = L.Trainer(
        max_steps=STEPS,
        callbacks=[saves],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"accelerator": "cpu"} if strategy is None else {"strategy": strategy()}),
    )
    loader = DataLoader(TensorDataset(*rows()), batch_size=BATCH, shuffle=True)
    trainer.fit(_Module(journal), loader, ckpt_path=path or "last")


def _ours(asynchronous: bool) -> XLAEagerStrategy:
    return XLAEagerStrategy(checkpoint=CheckpointConfig(asynchronous=asynchronous))


OURS: dict[str, Callable[..., None]] = {
    "hf_trainer, sync": partial(huggingface, asynchronous=False),
    "hf_trainer, async": partial(huggingface, asynchronous=True),
    "XLAEagerStrategy, sync": partial(lightning, strategy=partial(_ours, False)),
    "XLAEagerStrategy, async": partial(lightning, strategy=partial(_ours, True)),
}
PEERS: dict[str, Callable[..., None]] = {
    "transformers.Trainer": stock_huggingface,
    "Lightning's Trainer": partial(lightning, strategy=None),
}
RUNS = {**OURS, **PEERS}


@dataclass(frozen=True)
class Noted:
    """A loss that was noted, and how long after the first."""

    step: int
    loss: str


def losses(journal: Path, start: int = 0) -> list[Noted]:
    """What was noted from a byte of the journal on. A line that was cut off is none."""
    if not journal.exists():
        return []
    lines = journal.read_bytes()[start:].decode().split("\n")[:-1]
    return [Noted(int(line.split()[0]), line.split()[1]) for line in lines]


def die_after(seconds: float, journal: Path) -> None:
    """Has this process killed that long after its next loss is noted, by a process that needs nothing of it."""
    victim, before = os.getpid(), journal.stat().st_size if journal.exists() else 0
    if os.fork() != 0:
        return
    while os.getppid() == victim and (not journal.exists() or journal.stat().st_size == before):
        time.sleep(0.001)
    time.sleep(seconds)
    if os.getppid() == victim:
        os.kill(victim, signal.SIGKILL)
    os._exit(0)


def loads(run: Callable[..., None], folder: Path, path: Path) -> str | None:
    """What a training says that is to go on from a checkpoint; None if it says nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run(folder, folder / "unused.txt", path=str(path))
        except Exception as error:  # noqa: BLE001 (whatever it is, it was noticed)
            return f"{type(error).__name__}: {error}"
    return None
