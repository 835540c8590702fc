"""Programs without a fault, of 100 steps each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from transformers import EvalPrediction, TrainerCallback

import xla_adapters
from benchmarks.explain import with_lightning, with_transformers
from benchmarks.explain.own_loops import BATCH, CLASSES, Net, batches, eagerly
from benchmarks.explain.with_lightning import Plain
from benchmarks.explain.with_transformers import Texts, bert, train

STEPS = 100


def own_loop() -> None:
    """A schedule, clipped gradients, a loss that is read after the step, and validation."""
    model = Net().to("xla")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    total = 0.0
    for _ in range(STEPS // 20):
        model.train()
        for x, y in batches(20 * BATCH):
            x, y = x.to("xla"), y.to("xla")
            with xla_adapters.step(name="train"):
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
            total += loss.item()
        model.eval()
        for x, y in batches(2 * BATCH):
            with xla_adapters.step(name="validate"), torch.no_grad():
                right = (model(x.to("xla")).argmax(1) == y.to("xla")).sum()
            total += right.item()


def compiled_step() -> None:
    """Dropout, warm-up over a rate of 1, and an average of the weights after each step."""
    model = Net().to("xla")
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / 10))

    @xla_adapters.CompiledStep
    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for x, y in batches(STEPS * BATCH):
        train_step(x, y)
        warmup.step()
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)


def _accuracy(predictions: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((np.argmax(predictions.predictions, 1) == predictions.label_ids).mean())}


def hf_bert() -> None:
    """Evaluation with metrics, logging, and a cosine schedule."""
    options: dict[str, Any] = {"eval_strategy": "epoch", "lr_scheduler_type": "cosine", "warmup_steps": 10}
    data, held_out = Texts(STEPS // 4 * BATCH), Texts(3 * BATCH)
    train(bert(), data, eval_dataset=held_out, compute_metrics=_accuracy, num_train_epochs=4, **options)


class Losses(TrainerCallback):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.losses += [logs["loss"]] if "loss" in logs else []


def hf_accumulation() -> None:
    """Accumulated gradients and a callback."""
    data = Texts(STEPS // 2 * BATCH)
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "num_train_epochs": 2}
    train(with_transformers.Classifier(), data, callbacks=[Losses()], **options)


class WithMetrics(Plain):
    """Metrics of torchmetrics in training and validation."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)
        self.of_validation = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self.net(x)
        self.accuracy(logits, y)
        self.log("train_accuracy", self.accuracy, on_step=False, on_epoch=True)
        return F.cross_entropy(logits, y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.of_validation(self.net(x), y)
        self.log("validation_accuracy", self.of_validation)


def lightning() -> None:
    """Metrics, validation and clipped gradients."""
    data, held_out = batches(STEPS // 4 * BATCH), batches(3 * BATCH)
    with_lightning.fit(WithMetrics(), data, held_out, max_epochs=4, gradient_clip_val=1.0)


CLEAN: dict[str, Callable[[], object]] = {
    "own loop, step()": eagerly(own_loop),
    "own loop, CompiledStep": eagerly(compiled_step),
    "HF Trainer, BERT with evaluation": hf_bert,
    "HF Trainer, accumulated gradients": hf_accumulation,
    "Lightning, metrics and validation": lightning,
}
