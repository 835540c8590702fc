"""Layers with a few switches."""

from __future__ import annotations

import torch
from torch import nn

SCALE = 1.0


class GatedLinear(nn.Module):
    """A linear layer whose output is scaled by a helper object."""

    def __init__(self, inputs: int, outputs: int, gate: object | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.gate = gate
        self.strength = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * self.strength * SCALE
        return y if self.gate is None else y * self.gate.current()


class WarmingUp(nn.Module):
    """Counts its calls, and adds noise until it is warm."""

    def __init__(self, inputs: int, outputs: int, warm: int = 9) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.warm = warm
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) * (0.5 if self.calls < self.warm else 1.0)


class Meter:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.count = 0

    def tick(self) -> int:
        self.count += 1
        return self.count


class Metered(nn.Module):
    """Tells a meter of each call, and is careful until that has counted so many."""

    def __init__(self, inputs: int, outputs: int, warm: int = 9) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.meter = Meter()
        self.warm = warm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (0.5 if self.meter.tick() < self.warm else 1.0)
