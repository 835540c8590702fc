"""The cost of checkpoints in a training, for `benchmarks.checkpoint`: times the saves of trainers.

Each trainer trains the same network on the device and saves after every step. Timed is its method that saves
(`Trainer._save_checkpoint` of transformers, `Trainer.save_checkpoint` of Lightning). Before it, pending work of device
and disk is finished, and the state is copied to the host a few times for comparison. All trainers run at the same time,
each in its own process, and save alternately.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import PretrainedConfig, PreTrainedModel, TrainingArguments

import hf_trainer
from benchmarks.harness import Pause
from benchmarks.stock_lightning import stock_on_xla
from lightning_strategy import XLAEagerStrategy
from lightning_strategy.checkpoints import XLAEagerCheckpointIO
from xla_adapters import get_runtime, initialize

_LAYERS, _BATCH = 8, 4
# One differs from the next by half.
_COPIES = 3
STOCK_HF, STOCK_LIGHTNING = "transformers.Trainer", "Lightning's Trainer"


@dataclass(frozen=True)
class Times:
    """The times of one save, in seconds.

    Attributes:
        copy: of the state to the host, alone.
        blocked: until the training continues.
        total: until the checkpoint is complete.
    """

    copy: float
    blocked: float
    total: float


class _Layers(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(_LAYERS)))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.layers(x)
        return values.square().mean()


class _Pretrained(PreTrainedModel):  # type: ignore[no-untyped-call]
    config_class = PretrainedConfig

    def __init__(self, config: PretrainedConfig, width: int = 1) -> None:
        super().__init__(config)
        self.network = _Layers(width)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.network.loss(x)}


def width_of(megabytes: int) -> int:
    """The width of a network whose weights and two moments take so many megabytes."""
    return int((megabytes * 10**6 / 4 / 3 / _LAYERS) ** 0.5)


class _Clock:
    """Times saves, and gives the turn away after each; the first is a warm-up."""

    def __init__(self, pause: Pause) -> None:
        self.times: list[Times] = []
        self._pause, self._warm = pause, False

    def save(self, state: Iterable[torch.Tensor], save: Callable[[], None], settle: Callable[[], None]) -> None:
        runtime, tensors = get_runtime(), list(state)
        runtime.tracing.flush()
        runtime.device.wait()
        os.sync()
        copies = []
        for _ in range(_COPIES + 1):
            started = time.perf_counter()
            runtime.transfers.to_host(tensors)
            copied = time.perf_counter()
            copies.append(copied - started)
        # All but the first find memory that the process has, as a save does that is not the first.
        copy = statistics.median(copies[1:])
        save()
        blocked = time.perf_counter()
        settle()
        ended = time.perf_counter()
        if self._warm:
            self.times.append(Times(copy, blocked - copied, ended - copied))
        self._warm = True
        self._pause()


def _tensors(model: nn.Module, optimizer: Any) -> Iterable[torch.Tensor]:
    yield from model.parameters()
    for values in optimizer.state.values():
        yield from (
            value for value in values.values() if isinstance(value, torch.Tensor) and value.device.type == "xla"
        )


def huggingface(pause: Pause, *, width: int, rounds: int, where: Path, checkpoint: Any = None) -> list[Times]:
    """transformers' Trainer on the device; ours if `checkpoint` says how it saves."""
    initialize(eager=False)
    clock = _Clock(pause)
    base: Any = transformers.Trainer if checkpoint is None else partial(hf_trainer.Trainer, checkpoint=checkpoint)

    args = TrainingArguments(
        str(where),
        per_device_train_batch_size=_BATCH,
        max_steps=rounds + 1,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        optim="adamw_torch",
    )
    data = [{"x": row} for row in torch.randn(_BATCH * (rounds + 1), width)]
    trainer = base(model=_Pretrained(PretrainedConfig(), width), args=args, train_dataset=data)
    stock = trainer._save_checkpoint

    def save(model: Any, trial: Any) -> None:
        optimizer = trainer.optimizer
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        settle = trainer._xla.checkpoints.settle if checkpoint is not None else _nothing
        clock.save(_tensors(trainer.model, optimizer), lambda: stock(model, trial), settle)

    trainer._save_checkpoint = save
    trainer.train()
    return clock.times


class _Module(L.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.network = _Layers(width)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.network.loss(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class _Saves(L.Callback):
    def __init__(self, clock: _Clock, where: Path) -> None:
        self._clock, self._where = clock, where

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        io = trainer.strategy.checkpoint_io
        settle = io.settle if isinstance(io, XLAEagerCheckpointIO) else _nothing
        save = partial(trainer.save_checkpoint, self._where / "last.ckpt")
        self._clock.save(_tensors(pl_module, trainer.optimizers[0]), save, settle)


def lightning(pause: Pause, *, width: int, rounds: int, where: Path, checkpoint: Any = None) -> list[Times]:
    """Lightning's Trainer on the device, with its own strategy; with ours if `checkpoint` says how it saves."""
    initialize(eager=False)
    clock = _Clock(pause)
    chosen: dict[str, Any] = {"strategy": XLAEagerStrategy(checkpoint=checkpoint)}
    if checkpoint is None:
        chosen = stock_on_xla()
    trainer = L.Trainer(
        max_steps=rounds + 1,
        callbacks=[_Saves(clock, where)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **chosen,
    )
    data = DataLoader(TensorDataset(torch.randn(_BATCH * (rounds + 1), width)), batch_size=_BATCH)
    trainer.fit(_Module(width), data)
    return clock.times


def _nothing() -> None: ...


TRAINERS: dict[str, Callable[..., list[Times]]] = {
    STOCK_HF: huggingface,
    "hf_trainer, sync": partial(huggingface, checkpoint={"asynchronous": False}),
    "hf_trainer, async": partial(huggingface, checkpoint={"asynchronous": True}),
    STOCK_LIGHTNING: lightning,
    "XLAEagerStrategy, sync": partial(lightning, checkpoint={"asynchronous": False}),
    "XLAEagerStrategy, async": partial(lightning, checkpoint={"asynchronous": True}),
}


def players(names: Iterable[str], megabytes: int, rounds: int, where: Path) -> dict[str, Callable[[Pause], Any]]:
    """The trainers for `run_interleaved`, each with its own folder."""
    width = width_of(megabytes)
    return {
        name: partial(TRAINERS[name], width=width, rounds=rounds, where=Path(tempfile.mkdtemp(dir=where)))
        for name in names
    }
