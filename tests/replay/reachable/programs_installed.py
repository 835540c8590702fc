"""Helpers of an installed package: objects, counters and modules whose code is a library's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from reachable_helpers import layers, schedules
from reachable_helpers.layers import GatedLinear, Metered, WarmingUp
from reachable_helpers.schedules import LossWeight, Mixing, Registry, Temperature
from torch import nn

from tests.device import DEVICE
from tests.replay.reachable.data import CLASSES, FEATURES, classified, regressed
from tests.replay.reachable.program import Built, Loop, program
from tests.support import update


@program()
def helper_weight() -> Built:
    """The weight of a penalty is a helper's method."""
    model = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = LossWeight(0.5)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y) + weight.current() * model.weight.square().sum()
        return update(loss, optimizer)

    return Loop(step=train_step, batch=classified, model=model, optimizers=(optimizer,))


@program()
def helper_property() -> Built:
    """A temperature is a helper's property, the registry's weights its items."""
    model = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    temperature, registry = Temperature(), Registry()

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return update(F.cross_entropy(model(x) / temperature.value, y) * registry["ce"], optimizer)

    return Loop(step=train_step, batch=classified, model=model, optimizers=(optimizer,))


@program()
def gated_by_helper() -> Built:
    """A module of the package holds a helper of the package."""
    gate = schedules.LossWeight(1.0)
    model = nn.Sequential(GatedLinear(FEATURES, 5, gate), nn.Tanh(), layers.GatedLinear(5, CLASSES)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return update(F.cross_entropy(model(x), y), optimizer)

    return Loop(step=train_step, batch=classified, model=model, optimizers=(optimizer,))


@program()
def counter_of_a_module() -> Built:
    """A module of the package counts its calls, and is warm after some."""
    model = WarmingUp(FEATURES, CLASSES).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return update(F.mse_loss(model(x), y), optimizer)

    return Loop(step=train_step, batch=regressed, model=model, optimizers=(optimizer,))


@program()
def meter_of_a_module() -> Built:
    """A module of the package has an object count for it."""
    model = Metered(FEATURES, CLASSES).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return update(F.mse_loss(model(x), y), optimizer)

    return Loop(step=train_step, batch=regressed, model=model, optimizers=(optimizer,))


@program()
def mixed_by_helper() -> Built:
    """A dataclass of the package, in a dictionary."""
    model = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    config = {"mixing": Mixing()}

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mixing = config["mixing"]
        loss = F.mse_loss(model(x), y) * mixing.main
        if mixing.enabled:
            loss = loss + mixing.auxiliary * model.weight.abs().mean()
        return update(loss, optimizer)

    return Loop(step=train_step, batch=regressed, model=model, optimizers=(optimizer,))
