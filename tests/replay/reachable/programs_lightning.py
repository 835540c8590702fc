"""Trainings with Lightning: modules, callbacks and schedules of the user's own."""

# ruff: noqa: C417
from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from reachable_helpers.layers import GatedLinear
from reachable_helpers.schedules import LossWeight
from torch import nn
from torch.utils.data import DataLoader

from tests.replay.reachable.data import CLASSES, FEATURES, classified
from tests.replay.reachable.program import Built, LightningRun, program

_BATCHES = 11


def _loader(collate: Any = None) -> DataLoader[Any]:
    return DataLoader([classified(number) for number in range(_BATCHES)], batch_size=None, collate_fn=collate)


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 6), nn.ReLU(), nn.Linear(6, CLASSES))

    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return self.loss(self.net(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


@program(plain=True)
def lightning_plain() -> Built:
    return LightningRun(module=Classifier(), data=_loader())


class Scheduled(Classifier):
    """Logs, clips, and steps a schedule; its weight is a hyper-parameter."""

    def __init__(self, weight: float = 0.5) -> None:
        super().__init__()
        self.weight = weight

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = self.loss(self.net(x), y) * self.weight
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@program(plain=True)
def lightning_scheduled() -> Built:
    return LightningRun(module=Scheduled(), data=_loader(), options={"gradient_clip_val": 0.5})


@dataclass
class Stage:
    warm: bool = True


class Staged(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.stages = [Stage(), Stage()]

    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, y) * (0.1 if self.stages == [Stage(), Stage()] else 1.0)


@program()
def lightning_stages_compared() -> Built:
    return LightningRun(module=Staged(), data=_loader())


class Averaging(L.Callback):
    """Keeps an average of the weights, and puts it in when it is told to."""

    def __init__(self) -> None:
        self.decay = 0.9
        self.swap = False

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = [parameter.detach().clone() for parameter in pl_module.parameters()]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        with torch.no_grad():
            for mean, parameter in zip(self.average, pl_module.parameters(), strict=True):
                mean.lerp_(parameter, 1 - self.decay)
                if self.swap:
                    parameter.copy_(mean)


@program(plain=True)
def lightning_average_callback() -> Built:
    return LightningRun(module=Classifier(), data=_loader(), callbacks=(Averaging(),))


class Mapped(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.tasks = [SimpleNamespace(weight=1.0, shift=0.1), SimpleNamespace(weight=0.5, shift=0.0)]

    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.stack(
            list(map(lambda task: task.weight * F.cross_entropy(logits + task.shift, y), self.tasks))
        ).sum()


@program()
def lightning_tasks_mapped() -> Built:
    return LightningRun(module=Mapped(), data=_loader())


SETTINGS = {"noise": 1.0}


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor

    def scaled(self) -> torch.Tensor:
        return self.x * SETTINGS["noise"]


class OnPairs(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self.net(batch.scaled()), batch.y)


@program()
def lightning_batch_with_a_method() -> Built:
    return LightningRun(module=OnPairs(), data=_loader(lambda sample: Pair(*sample)))


class NumpyScaled(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.scale = np.float64(0.5)
        self.net[0].weight.factor = 1.0  # type: ignore[union-attr]

    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits * self.scale, y) + 0.1 * self.net[0].weight.square().sum() * self.factor

    @property
    def factor(self) -> float:
        return float(getattr(self.net[0].weight, "factor", 1.0))


@program()
def lightning_numpy_scale() -> Built:
    return LightningRun(module=NumpyScaled(), data=_loader())


class Lion(torch.optim.Optimizer):
    """Sign of a mean, with a norm of an order that is an option."""

    def __init__(self, params: Any, lr: float = 0.01, beta: float = 0.9, order: float = 2.0) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "order": order})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                norm = torch.linalg.vector_norm(p.grad, ord=group["order"])
                state["mean"].mul_(group["beta"]).add_(p.grad / (norm + 1e-6), alpha=1 - group["beta"])
                p.add_(state["mean"].sign(), alpha=-group["lr"])


class WithLion(Classifier):
    def configure_optimizers(self) -> Any:
        return Lion(self.parameters())


@program()
def lightning_own_optimizer() -> Built:
    return LightningRun(module=WithLion(), data=_loader())


class Helped(Classifier):
    """Layers and a weight of an installed package."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = LossWeight(0.5)
        self.net = nn.Sequential(GatedLinear(FEATURES, 6, self.weight), nn.ReLU(), nn.Linear(6, CLASSES))

    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, y) * self.weight.current()


@program()
def lightning_helper_layers() -> Built:
    return LightningRun(module=Helped(), data=_loader())


class Tempered(Classifier):
    """A temperature that is a buffer of the host, registered when training begins."""

    def on_train_start(self) -> None:
        self.register_buffer("temperature", torch.tensor(1.0), persistent=False)

    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits / self.temperature, y)


@program()
def lightning_temperature_on_the_host() -> Built:
    return LightningRun(module=Tempered(), data=_loader())
