"""A small classifier, its batches and its training step, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional

Train = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def net_on(device: str, *more: nn.Module) -> nn.Sequential:
    """The same weights at each call; further layers come before the last one."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), *more, nn.Linear(16, 4)).to(device)


def batches(device: str, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same inputs and classes at each call."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        inputs, classes = torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)
        yield inputs.to(device), classes.to(device)


def training(net: nn.Module, optimizer: torch.optim.Optimizer, *, clip: float | None = 1.0) -> Train:
    """A training step."""

    def train(inputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(net(inputs), classes)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return train
