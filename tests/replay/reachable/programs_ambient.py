"""What surrounds a step: modes that a loop enters, the environment, generators, defaults."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.device import DEVICE
from tests.replay.reachable.data import CLASSES, FEATURES, classified, regressed
from tests.replay.reachable.program import Built, Loop, program
from tests.support import update


@program(plain=True)
def nothing_around() -> Built:
    """A step like any other; modes are entered around it."""
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return update(F.cross_entropy(model(x), y), optimizer)

    return Loop(step=train_step, batch=classified, model=model, optimizers=(optimizer,))


class _Saving:
    """Compresses what is saved for the backward, while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.factor = 0.5
        self._open = contextlib.ExitStack()

    def end(self) -> None:
        self._open.close()

    def __call__(self, number: int) -> None:
        self.end()
        if self.on:
            self._open.enter_context(
                torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor),
            )

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * self.factor if tensor.is_floating_point() else tensor


@program()
def saving_compressed() -> Built:
    """A callback enters `saved_tensors_hooks` between steps."""
    model = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saving = _Saving()

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return update(F.mse_loss(torch.tanh(model(x)), y), optimizer)

    return Loop(
        step=train_step,
        batch=regressed,
        model=model,
        optimizers=(optimizer,),
        after=saving,
        end=saving.end,
        roots={"saving": saving},
    )


class _Damping(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 0.5

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * self.factor if func is torch.ops.aten.tanh.default else found


@program()
def dispatch_mode_of_its_own() -> Built:
    """The step enters a mode that sees each operator."""
    model = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    damping = _Damping()

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with damping:
            output = torch.tanh(model(x))
        return update(F.mse_loss(output, y), optimizer)

    return Loop(step=train_step, batch=regressed, model=model, optimizers=(optimizer,))


@program()
def environment_read() -> Built:
    """An option from the environment."""
    os.environ["LOSS_SCALE"] = "1"
    model = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y) * float(os.environ.get("LOSS_SCALE", "1"))
        return update(loss, optimizer)

    return Loop(step=train_step, batch=classified, model=model, optimizers=(optimizer,))


@program(plain=True)
def autocast_inside() -> Built:
    """Mixed precision whose dtype and switch are settings."""
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    dtype, enabled = torch.bfloat16, True

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(DEVICE, dtype=dtype, enabled=enabled):
            output = model(x)
        return update(F.cross_entropy(output.float(), y), optimizer)

    return Loop(step=train_step, batch=classified, model=model, optimizers=(optimizer,))


@program()
def noise_from_the_host() -> Built:
    """Random numbers of the host, drawn in each step."""
    model = nn.Linear(FEATURES, CLASSES).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return update(F.mse_loss(model(x + torch.randn(x.shape).to(x.device) * 0.1), y), optimizer)

    return Loop(step=train_step, batch=regressed, model=model, optimizers=(optimizer,))
