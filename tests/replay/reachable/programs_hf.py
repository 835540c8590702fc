"""Trainings with the HF Trainer: models, losses, callbacks and collators of the user's own."""

# ruff: noqa: C417
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from reachable_helpers.schedules import LossWeight
from torch import nn
from transformers import TrainerCallback
from transformers.modeling_outputs import SequenceClassifierOutput

import hf_trainer
from tests.device import DEVICE
from tests.replay.reachable.data import CLASSES, FEATURES, samples
from tests.replay.reachable.program import Built, TrainerRun, program


class Classifier(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, CLASSES))
        self.scale = 1.0

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.layers(x) * self.scale
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


@program(plain=True)
def hf_plain_classifier() -> Built:
    return TrainerRun(model=Classifier(dropout=0.1), data=samples(), args={"warmup_steps": 3})


@program(plain=True)
def hf_model_output() -> Built:
    """An output class of transformers, bf16, weight decay."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(FEATURES, CLASSES)
            self.smoothing = 0.1

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> SequenceClassifierOutput:
            logits = self.linear(x)
            loss = F.cross_entropy(logits, labels, label_smoothing=self.smoothing)
            return SequenceClassifierOutput(loss=loss, logits=logits)

    return TrainerRun(model=Model(), data=samples(), args={"weight_decay": 0.1})


class Weighted(hf_trainer.Trainer):
    """Weighs its loss by an attribute."""

    weight = 0.5

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs["loss"] * self.weight
        return (loss, outputs) if return_outputs else loss


@program(plain=True)
def hf_weighted_loss() -> Built:
    return TrainerRun(model=Classifier(), data=samples(), trainer_class=Weighted)


@dataclass
class Stage:
    warm: bool = True


STAGES = [Stage(), Stage()]


class Staged(hf_trainer.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs["loss"] * (0.1 if [Stage(), Stage()] == STAGES else 1.0)
        return (loss, outputs) if return_outputs else loss


@program()
def hf_stages_compared() -> Built:
    return TrainerRun(model=Classifier(), data=samples(), trainer_class=Staged)


class Annealing(TrainerCallback):
    """Holds a weight that falls; the loss reads it."""

    def __init__(self) -> None:
        self.beta = 0.5
        self.rate = 1.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.beta *= self.rate


@program()
def hf_annealing_callback() -> Built:
    annealing = Annealing()

    class Regularized(hf_trainer.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            outputs = model(**inputs)
            loss = outputs["loss"] + annealing.beta * outputs["logits"].square().mean()
            return (loss, outputs) if return_outputs else loss

    return TrainerRun(
        model=Classifier(), data=samples(), trainer_class=Regularized, callbacks=(annealing,), args={"optim": "sgd"}
    )


class Mapped(hf_trainer.Trainer):
    """Several losses by a lambda over tasks."""

    tasks = (SimpleNamespace(weight=1.0), SimpleNamespace(weight=0.5))

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        loss = sum(map(lambda task: task.weight * outputs["loss"], self.tasks))
        return (loss, outputs) if return_outputs else loss


@program()
def hf_tasks_mapped() -> Built:
    return TrainerRun(model=Classifier(), data=samples(), trainer_class=Mapped)


class NumpyModel(nn.Module):
    """Its scale came out of numpy; a temperature is a buffer that stays on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.scale = np.float32(2.0)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.linear(x) * float(self.scale)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


@program()
def hf_numpy_scale() -> Built:
    return TrainerRun(model=NumpyModel(), data=samples(), args={"max_grad_norm": 0.0})


class SignSGD(torch.optim.Optimizer):
    """Updates by the sign of so many of the largest gradients."""

    def __init__(self, params: Any, lr: float = 0.01, keep: int = 2) -> None:
        super().__init__(params, {"lr": lr, "keep": keep})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    threshold = p.grad.abs().flatten().topk(group["keep"]).values[-1]
                    p.add_(p.grad.sign() * (p.grad.abs() >= threshold), alpha=-group["lr"])


@program()
def hf_own_optimizer() -> Built:
    model = Classifier().to(DEVICE)
    optimizer = SignSGD(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return TrainerRun(model=model, data=samples(), options={"optimizers": (optimizer, schedule)})


class Tagged(dict):  # type: ignore[type-arg]
    """A batch whose temperature the collator sets."""

    temperature: float = 1.0


class Collator:
    def __init__(self) -> None:
        self.temperature = 1.0

    def __call__(self, rows: list[Mapping[str, Any]]) -> Tagged:
        batch = Tagged(torch.utils.data.default_collate(rows))
        batch.temperature = self.temperature
        return batch


@program()
def hf_tagged_batches() -> Built:
    class Tempered(hf_trainer.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            outputs = model(**inputs)
            loss = outputs["loss"] * getattr(inputs, "temperature", 1.0)
            return (loss, outputs) if return_outputs else loss

    return TrainerRun(model=Classifier(), data=samples(), trainer_class=Tempered, options={"data_collator": Collator()})


@program()
def hf_helper_weight() -> Built:
    """The loss's weight is a helper's of an installed package."""
    weight = LossWeight(0.5)

    def compute_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return F.cross_entropy(outputs["logits"], labels) * weight.current()

    return TrainerRun(
        model=Classifier(),
        data=samples(),
        options={"compute_loss_func": compute_loss},
        roots={"compute_loss": compute_loss},
    )
