"""Buffers that live on the host, and what Python sets on tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.device import DEVICE
from tests.replay.reachable.data import CLASSES, FEATURES, classified, regressed
from tests.replay.reachable.program import Built, Loop, program
from tests.support import update


def _stepped(model: nn.Module, loss_of: Any, batch: Any = classified, lr: float = 0.1) -> Built:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return update(loss_of(x, y), optimizer)

    return Loop(step=train_step, batch=batch, model=model, optimizers=(optimizer,))


@program()
def temperature_on_the_host() -> Built:
    """A 0-dim buffer that was registered after the move to the device."""
    model = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    model.register_buffer("temperature", torch.tensor(1.0))
    return _stepped(model, lambda x, y: F.cross_entropy(model(x) * model.temperature, y))


class Curriculum(nn.Module):
    """Branches on a buffer of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.linear(x)
        return output * 0.1 if bool(self.hard) else output


@program()
def curriculum_by_buffer() -> Built:
    """`hard` is a flag as a tensor, set by the loop."""
    model = Curriculum().to(DEVICE)
    model.register_buffer("hard", torch.tensor(False))
    return _stepped(model, lambda x, y: F.mse_loss(model(x), y), regressed)


class Counted(nn.Module):
    """Counts its steps in a buffer, as schedules are kept in checkpoints; the loop keeps it on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.linear(x) / float(self.steps)


@program()
def steps_counted_on_the_host() -> Built:
    model = Counted().to(DEVICE)
    model.register_buffer("steps", torch.tensor(0.0), persistent=False)
    return _stepped(model, lambda x, y: F.cross_entropy(model(x), y))


@program()
def class_weights_on_the_host() -> Built:
    """Brought to the device in each step."""
    model = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    weights = torch.tensor([1.0, 0.5, 2.0])
    return _stepped(model, lambda x, y: F.cross_entropy(model(x), y, weight=weights.to(x.device)))


@program()
def margin_tensor_in_dictionary() -> Built:
    """A number kept as a tensor among settings."""
    model = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    settings = {"margin": torch.tensor(0.5), "scale": torch.tensor(1.0, device=DEVICE)}

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.relu(model(x) - settings["margin"]).mean() * settings["scale"] + F.mse_loss(model(x), y)

    return _stepped(model, loss_of, regressed)


@program(plain=True)
def annealed_buffer_on_the_device() -> Built:
    """A buffer on the device is an input of the graph."""
    model = nn.Linear(FEATURES, CLASSES)
    model.register_buffer("temperature", torch.tensor(1.0))
    model = model.to(DEVICE)
    return _stepped(model, lambda x, y: F.cross_entropy(model(x) * model.temperature, y))


class Scaled(nn.Module):
    """Its weight knows its factor, as muP's parameters do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, FEATURES) * 0.3)
        self.bias = nn.Parameter(torch.zeros(CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight * self.weight.factor, self.bias)


@program()
def factor_of_a_weight() -> Built:
    model = Scaled().to(DEVICE)
    model.weight.factor = 2.0  # type: ignore[attr-defined]
    return _stepped(model, lambda x, y: F.cross_entropy(model(x), y))


@program()
def quantizer_of_a_weight() -> Built:
    """A quantizer that hangs on the weight."""
    model = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    model.weight.quantizer = SimpleNamespace(levels=8.0, enabled=True)  # type: ignore[attr-defined]

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        quantizer = model.weight.quantizer
        weight = model.weight
        if quantizer.enabled:
            rounded = (weight * quantizer.levels).round() / quantizer.levels
            weight = weight + (rounded - weight).detach()
        return F.cross_entropy(F.linear(x, weight, model.bias), y)

    return _stepped(model, loss_of)


@program()
def decay_of_parameters() -> Built:
    """Each parameter says whether it is decayed."""
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES)).to(DEVICE)
    for name, parameter in model.named_parameters():
        parameter.decay = 0.1 if name.endswith("weight") else 0.0  # type: ignore[attr-defined]
        parameter.rules = {"clip": name.startswith("0")}  # type: ignore[attr-defined]

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        penalty = sum(p.decay * p.square().sum() for p in model.parameters() if p.rules["clip"])
        return F.cross_entropy(model(x), y) + penalty

    return _stepped(model, loss_of)


@program()
def factor_of_a_buffer() -> Built:
    """The attribute of a buffer, and one of a tensor in a closure."""
    model = nn.Linear(FEATURES, CLASSES)
    model.register_buffer("mask", torch.ones(FEATURES))
    model = model.to(DEVICE)
    model.mask.strength = 1.0
    anchor = torch.zeros(CLASSES, FEATURES, device=DEVICE)
    anchor.pull = 0.1  # type: ignore[attr-defined]

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        pulled = (model.weight - anchor).square().sum() * anchor.pull
        return F.cross_entropy(model(x * model.mask * model.mask.strength), y) + pulled

    return _stepped(model, loss_of)
