"""Objects of the user's own inside containers: comparing, adding, sorting, printing them runs their methods."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.device import DEVICE
from tests.replay.reachable.data import CLASSES, FEATURES, classified, regressed
from tests.replay.reachable.program import Built, Loop, program
from tests.support import update


@dataclass
class Stage:
    warm: bool = True
    weight: float = 1.0


@program()
def stages_compared() -> Built:
    """Scales the loss down while all stages are as they began."""
    model = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stages = [Stage(), Stage()]

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scale = 0.1 if stages == [Stage(), Stage()] else 1.0
        return update(F.cross_entropy(model(x), y) * scale, optimizer)

    return Loop(step=train_step, batch=classified, model=model, optimizers=(optimizer,))


@dataclass
class Phase:
    name: str
    frozen: bool = False


@program()
def phase_in_list() -> Built:
    """Regularizes in phases that are listed."""
    model = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    current = Phase("warm")
    regularized = [Phase("warm"), Phase("main")]

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), y)
        if current in regularized:
            loss = loss + 0.1 * model.weight.square().sum()
        return update(loss, optimizer)

    return Loop(step=train_step, batch=regressed, model=model, optimizers=(optimizer,))


class Criterion:
    """A loss that may be switched off."""

    def __init__(self, weight: float, active: bool = True) -> None:
        self.weight = weight
        self.active = active

    def __bool__(self) -> bool:
        return self.active

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.weight * F.mse_loss(output, target)


@program()
def active_criteria() -> Built:
    """Adds the losses that are switched on."""
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criteria = [Criterion(1.0), Criterion(0.5), Criterion(0.25, active=False)]

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output = model(x)
        scale = 0.5 if any(criteria) else 2.0
        used = list(filter(None, criteria))
        loss = F.mse_loss(output, y) * scale + 0.1 * len(used) * output.square().mean()
        return update(loss, optimizer)

    return Loop(step=train_step, batch=regressed, model=model, optimizers=(optimizer,))


class Share:
    """A part of the loss, as a number that can be added up."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __add__(self, other: Any) -> float:
        return self.value + float(other)

    def __radd__(self, other: Any) -> float:
        return float(other) + self.value

    def __float__(self) -> float:
        return self.value


@program()
def shares_added() -> Built:
    """Divides by the sum of what counts."""
    model = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shares = (Share(0.5), Share(0.25), Share(1.0))

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return update(F.cross_entropy(model(x), y) / sum(shares), optimizer)

    return Loop(step=train_step, batch=classified, model=model, optimizers=(optimizer,))


class Variant:
    """Which loss is used, by its text."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name


@program()
def variant_by_text() -> Built:
    """Chooses the loss by a text made of objects."""
    model = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    variants = {"loss": Variant("ce"), "reduction": Variant("mean")}

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output = model(x)
        key = f"{variants['loss']}/{variants['reduction']}"
        loss = F.cross_entropy(output, y) if key == "ce/mean" else output.square().sum() * 0.01
        if " ".join(map(str, variants.values())) != "ce mean":
            loss = loss * 0.5
        return update(loss, optimizer)

    return Loop(step=train_step, batch=classified, model=model, optimizers=(optimizer,))


@dataclass(order=True)
class Priority:
    rank: int
    weight: float = field(compare=False, default=1.0)


@program()
def sorted_by_priority() -> Built:
    """The first of the sorted losses counts."""
    model = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    priorities = [Priority(2, 0.5), Priority(1, 1.0), Priority(3, 2.0)]

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = sorted(priorities)[0]
        highest = max(priorities)
        loss = F.mse_loss(model(x), y) * first.weight + highest.weight * model.bias.square().sum()
        return update(loss, optimizer)

    return Loop(step=train_step, batch=regressed, model=model, optimizers=(optimizer,))


class Split(enum.Enum):
    TRAIN = "train"
    HELD_OUT = "held out"


@dataclass
class Source:
    split: Split = Split.TRAIN
    repeats: int = 1


@program()
def sources_of_data() -> Built:
    """Weighs by whether any source is one of those to be trained on, compared as wholes."""
    model = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"sources": [Source(), Source(repeats=2)], "wanted": (Source(repeats=2),)}

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        wanted = [source for source in config["sources"] if source in config["wanted"]]
        loss = F.cross_entropy(model(x), y) * (1.0 if wanted else 0.2)
        if config["sources"].count(Source()) != 1:
            loss = loss + model.weight.abs().sum()
        return update(loss, optimizer)

    return Loop(step=train_step, batch=classified, model=model, optimizers=(optimizer,))
