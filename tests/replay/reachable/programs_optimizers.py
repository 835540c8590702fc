"""Optimizers that users write: their numbers are rarely inputs of a graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from tests.device import DEVICE
from tests.replay.reachable.data import CLASSES, FEATURES, classified
from tests.replay.reachable.program import Built, Loop, program
from tests.support import update


def _trained(make: Callable[[Any], Optimizer]) -> Built:
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES)).to(DEVICE)
    optimizer = make(model.parameters())

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return update(F.cross_entropy(model(x), y), optimizer)

    return Loop(step=train_step, batch=classified, model=model, optimizers=(optimizer,))


class TopK(Optimizer):
    """Updates only where the gradient is largest."""

    def __init__(self, params: Any, lr: float = 0.5, k: int = 2) -> None:
        super().__init__(params, {"lr": lr, "k": k})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                threshold = p.grad.abs().flatten().topk(group["k"]).values[-1]
                p.add_(p.grad * (p.grad.abs() >= threshold), alpha=-group["lr"])


@program()
def topk_optimizer() -> Built:
    return _trained(TopK)


class Filled(Optimizer):
    """Its rate is a tensor that is filled anew each time."""

    def __init__(self, params: Any, lr: float = 0.3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(torch.full(p.shape, group["lr"], device=p.device) * p.grad)


@program()
def filled_rate_optimizer() -> Built:
    return _trained(Filled)


class NormedGradient(Optimizer):
    """Divides by a norm of an order, or by a power of the mean."""

    def __init__(self, params: Any, lr: float = 0.1, order: float = 2.0, power: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "order": order, "power": power, "nesterov": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                norm = torch.linalg.vector_norm(p.grad, ord=group["order"])
                scaled = p.grad / (norm + 1e-6) + p.grad.abs().pow(group["power"]) * p.grad.sign()
                p.add_(-scaled if group["nesterov"] else scaled, alpha=-group["lr"])


@program()
def normed_optimizer() -> Built:
    return _trained(NormedGradient)


class Partial(Optimizer):
    """Trains only the first rows of each parameter; one of them is decayed."""

    def __init__(self, params: Any, lr: float = 0.2, rows: int = 2, decayed: int = 0) -> None:
        super().__init__(params, {"lr": lr, "rows": rows, "decayed": decayed})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p[: group["rows"]].sub_(p.grad[: group["rows"]] * group["lr"])
                    p[group["decayed"]].mul_(0.99)


@program()
def partial_optimizer() -> Built:
    return _trained(Partial)


class Momentum(Optimizer):
    """Keeps a running mean, with a correction for its beginning."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9, sign: bool = False) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "sign": sign})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                state["mean"].lerp_(p.grad, 1 - group["beta"])
                update = state["mean"].sign() if group["sign"] else state["mean"]
                p.add_(update, alpha=-group["lr"])


@program()
def momentum_optimizer() -> Built:
    return _trained(Momentum)


class Annealed(Optimizer):
    """Langevin noise of a temperature, and a rate from a formula in an attribute."""

    temperature = 0.01

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.decay = 0.5
        self.floor: float | None = None

    def rate(self, group: dict[str, Any]) -> float:
        return group["lr"] * math.exp(-self.decay)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    noise = torch.normal(0.0, self.temperature, p.shape, device=p.device)
                    p.add_(p.grad + noise, alpha=-self.rate(group))


@program()
def langevin_optimizer() -> Built:
    return _trained(Annealed)


class Quantized(Optimizer):
    """Rounds each update to so many levels, between bounds."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "levels": 8, "bounds": (-0.5, 0.5)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            low, high = group["bounds"]
            grid = torch.linspace(low, high, group["levels"], device=DEVICE)
            for p in group["params"]:
                if p.grad is not None:
                    nearest = (p.grad.unsqueeze(-1) - grid).abs().argmin(-1)
                    p.sub_(grid[nearest] * group["lr"])


@program()
def quantized_optimizer() -> Built:
    return _trained(Quantized)
