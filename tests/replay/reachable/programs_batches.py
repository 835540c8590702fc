"""Batches whose class carries code or attributes."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from tests.device import DEVICE
from tests.replay.reachable.data import CLASSES, FEATURES, classified, regressed
from tests.replay.reachable.program import Built, Loop, program
from tests.support import update

NOISE = SimpleNamespace(scale=1.0)


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor

    def scaled(self) -> torch.Tensor:
        return self.x * NOISE.scale


@program()
def batch_with_a_method() -> Built:
    """A NamedTuple that scales its input."""
    model = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(batch: Pair) -> torch.Tensor:
        return update(F.cross_entropy(model(batch.scaled()), batch.y), optimizer)

    return Loop(
        step=train_step, batch=lambda number: (Pair(*classified(number)),), model=model, optimizers=(optimizer,)
    )


WEIGHTS = {"positive": 2.0, "negative": 0.5}


class Weighted(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor

    @property
    def weight(self) -> float:
        return WEIGHTS["positive"] - WEIGHTS["negative"]


@program()
def batch_with_a_property() -> Built:
    """A NamedTuple that knows how much it counts."""
    model = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(batch: Weighted) -> torch.Tensor:
        return update(F.mse_loss(model(batch.x), batch.y) * batch.weight, optimizer)

    return Loop(
        step=train_step, batch=lambda number: (Weighted(*regressed(number)),), model=model, optimizers=(optimizer,)
    )


class Features(dict):  # type: ignore[type-arg]
    """A batch as a dictionary, with what the collator says of it."""

    temperature: float = 1.0

    @property
    def inputs(self) -> torch.Tensor:
        return self["x"] / self.temperature


@program()
def dict_batch_with_attributes() -> Built:
    """The collator sets how warm a batch is."""
    model = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    collator = SimpleNamespace(temperature=2.0)

    def batch(number: int) -> tuple[Features]:
        x, y = classified(number)
        features = Features(x=x, y=y)
        features.temperature = collator.temperature
        return (features,)

    def train_step(features: Features) -> torch.Tensor:
        loss = F.cross_entropy(model(features["x"]) / features.temperature, features["y"])
        return update(loss, optimizer)

    return Loop(step=train_step, batch=batch, model=model, optimizers=(optimizer,), roots={"collator": collator})


@dataclass
class Example:
    x: torch.Tensor
    y: torch.Tensor
    weight: float = 1.0
    task: str = "ce"


@program()
def dataclass_batch() -> Built:
    """A dataclass of tensors and options."""
    model = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"weight": 1.0, "task": "ce"}

    def train_step(example: Example) -> torch.Tensor:
        output = model(example.x)
        loss = F.cross_entropy(output, example.y) if example.task == "ce" else output.square().mean()
        return update(loss * example.weight, optimizer)

    def batch(number: int) -> tuple[Example]:
        x, y = classified(number)
        return (Example(x.to(DEVICE), y.to(DEVICE), **options),)

    return Loop(step=train_step, batch=batch, model=model, optimizers=(optimizer,), roots={"options": options})


@program(plain=True)
def batch_with_numbers() -> Built:
    """Plain numbers and words go with the tensors."""
    model = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given: dict[str, Any] = {"weight": 0.5, "reduction": "mean"}

    def train_step(x: torch.Tensor, y: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y, reduction=extra["reduction"]) * extra["weight"]
        return update(loss, optimizer)

    return Loop(
        step=train_step,
        batch=lambda number: (*classified(number), dict(given)),
        model=model,
        optimizers=(optimizer,),
        roots={"given": given},
    )
