"""Functions given to functions: lambdas in `map`, `filter`, `sorted`; partials; losses in dictionaries."""

# ruff: noqa: C417
from __future__ import annotations

import functools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.device import DEVICE
from tests.replay.reachable.data import CLASSES, FEATURES, classified, regressed
from tests.replay.reachable.program import Built, Loop, program
from tests.support import update


@program()
def tasks_mapped() -> Built:
    """Each task has a weight; a lambda reads it."""
    model = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tasks = [SimpleNamespace(weight=1.0), SimpleNamespace(weight=0.5)]

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output = model(x)
        loss = torch.stack(list(map(lambda task: task.weight * F.cross_entropy(output, y), tasks))).sum()
        return update(loss, optimizer)

    return Loop(step=train_step, batch=classified, model=model, optimizers=(optimizer,))


@dataclass
class Head:
    scale: float
    enabled: bool = True
    order: int = 0


@program()
def heads_filtered() -> Built:
    """Only enabled heads take part."""
    model = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    heads = [Head(1.0), Head(0.5, enabled=False), Head(0.25)]

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output = model(x)
        used = len(list(filter(lambda head: head.enabled, heads)))
        return update(F.mse_loss(output, y) * used, optimizer)

    return Loop(step=train_step, batch=regressed, model=model, optimizers=(optimizer,))


@program()
def heads_sorted() -> Built:
    """The head of lowest order counts, and the one of the largest scale."""
    model = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    heads = [Head(1.0, order=1), Head(0.5, order=2), Head(0.25, order=3)]

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = sorted(heads, key=lambda head: head.order)[0]
        widest = max(heads, key=lambda head: head.scale)
        loss = F.mse_loss(model(x), y) * first.scale + model.bias.abs().sum() * widest.scale
        return update(loss, optimizer)

    return Loop(step=train_step, batch=regressed, model=model, optimizers=(optimizer,))


@program()
def penalties_by_lambda() -> Built:
    """Lambdas over parameter groups with settings in dictionaries."""
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, CLASSES)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    penalties = {"first": {"layer": 0, "rate": 0.01}, "last": {"layer": 2, "rate": 0.02}}

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        terms = map(lambda item: item["rate"] * model[item["layer"]].weight.square().sum(), penalties.values())
        return update(F.cross_entropy(model(x), y) + sum(terms), optimizer)

    return Loop(step=train_step, batch=classified, model=model, optimizers=(optimizer,))


def _smoothed(output: torch.Tensor, target: torch.Tensor, smoothing: float) -> torch.Tensor:
    return F.cross_entropy(output, target, label_smoothing=smoothing)


@program()
def partial_loss() -> Built:
    """A loss with its option bound."""
    model = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = functools.partial(_smoothed, smoothing=0.1)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return update(criterion(model(x), y), optimizer)

    return Loop(step=train_step, batch=classified, model=model, optimizers=(optimizer,))


def _l2(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def _l1(output: torch.Tensor) -> torch.Tensor:
    return output.abs().mean()


LOSSES: dict[str, Any] = {"a": _l2, "b": _l1}
CHOICE = "a"


@program(plain=True)
def loss_by_name() -> Built:
    """A global dictionary of losses, and a global name."""
    model = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output = model(x)
        return update(F.cross_entropy(output, y) + LOSSES[CHOICE](output), optimizer)

    return Loop(step=train_step, batch=classified, model=model, optimizers=(optimizer,))
