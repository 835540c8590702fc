"""Attributes of modules of all kinds: numpy scalars, descriptors, hooks, classes with code of their own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.device import DEVICE
from tests.replay.reachable.data import CLASSES, FEATURES, classified, regressed
from tests.replay.reachable.program import Built, Loop, program
from tests.support import update


def _stepped(model: nn.Module, batch: Any = classified) -> Built:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = F.cross_entropy if batch is classified else F.mse_loss

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return update(criterion(model(x), y), optimizer)

    return Loop(step=train_step, batch=batch, model=model, optimizers=(optimizer,))


class NumpyScaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.scale = np.float32(0.5)
        self.width = np.int64(3)
        self.on = np.bool_(True)
        self.shift = np.ones(CLASSES, dtype=np.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.linear(x[:, : int(self.width)].repeat(1, 2)[:, :FEATURES])
        return output * float(self.scale) if self.on else output


@program()
def numpy_scalars() -> Built:
    return _stepped(NumpyScaled().to(DEVICE))


class Float64Scaled(nn.Module):
    """`np.float64` is a float, and a numpy scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.scale = np.sqrt(np.float64(2.0))
        self.table = {"a": np.float64(0.5)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale + self.table["a"]


@program()
def numpy_float64() -> Built:
    return _stepped(Float64Scaled().to(DEVICE))


class Float32Scaled(nn.Module):
    """`np.float32` is no float."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.scale = np.float32(2.0)
        self.stop = np.int64(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.linear(x) * self.scale
        return output + output[:, : self.stop].sum(-1, keepdim=True)


@program()
def numpy_float32() -> Built:
    return _stepped(Float32Scaled().to(DEVICE))


@program()
def numpy_slope() -> Built:
    """Options of torch's own modules that come from a sweep with `np.linspace`."""
    slopes = np.linspace(0.0, 0.5, 3, dtype=np.float32)
    return _stepped(nn.Sequential(nn.Linear(FEATURES, 5), nn.LeakyReLU(slopes[1]), nn.Linear(5, CLASSES)).to(DEVICE))


class Clamped:
    """A descriptor that keeps a number within bounds."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"_{name}"

    def __get__(self, owner: Any, cls: type | None = None) -> Any:
        return min(max(vars(owner)[self.name], self.low), self.high)

    def __set__(self, owner: Any, value: float) -> None:
        vars(owner)[self.name] = value


class Bounded(nn.Module):
    strength = Clamped(0.0, 1.0)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.strength = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.strength


@program()
def descriptor_of_a_module() -> Built:
    return _stepped(Bounded().to(DEVICE))


class AttrDict(dict):  # type: ignore[type-arg]
    """A dictionary whose keys are attributes, scaled by a global."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name] * SCALES.factor
        except KeyError:
            raise AttributeError(name) from None


SCALES = SimpleNamespace(factor=1.0)


@program()
def attribute_dictionary() -> Built:
    model = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = AttrDict(weight=0.5, inner=AttrDict(weight=2.0)["weight"])

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y) * config.weight + config.inner * model.bias.square().sum()
        return update(loss, optimizer)

    return Loop(step=train_step, batch=classified, model=model, optimizers=(optimizer,))


class Watching(nn.Module):
    """A module that is registered as a hook on another one's output."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = 0.5

    def forward(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * self.gain


@program()
def module_as_hook() -> Built:
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES)).to(DEVICE)
    watching = Watching()
    model[1].register_forward_hook(watching)
    built = _stepped(model)
    assert isinstance(built, Loop)
    built.roots = {"watching": watching}
    return built


class Kind(type):
    """Says which objects count as its instances."""

    strict = True

    def __instancecheck__(cls, instance: Any) -> bool:
        return bool(getattr(instance, "enabled", False)) or not cls.strict


class Enabled(metaclass=Kind):
    """Whatever is enabled."""


@program()
def instances_by_metaclass() -> Built:
    model = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    part = SimpleNamespace(enabled=True)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), y) * (1.0 if isinstance(part, Enabled) else 0.25)
        return update(loss, optimizer)

    return Loop(step=train_step, batch=regressed, model=model, optimizers=(optimizer,))


class Switchable(nn.Module):
    """Properties, lists, dictionaries and functions as attributes."""

    slope = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.activation = torch.tanh
        self.scales = [1.0, 0.5]
        self.options = {"residual": True, "power": 1}
        self._drop = 0.0

    @property
    def strength(self) -> float:
        return self.scales[0] * self.slope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.activation(self.linear(x)) * self.strength
        return output + x[:, :CLASSES] * self.scales[1] if self.options["residual"] else output


@program()
def attributes_of_all_kinds() -> Built:
    return _stepped(Switchable().to(DEVICE))
