"""`alike`: runs a program with and without replay, and demands the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from xla_adapters import CompiledStep, XLAConfig

# Is given what makes a step of a function, and returns what must be equal.
Body = Callable[[Callable[..., CompiledStep[Any]]], Any]


def alike(body: Body, **options: Any) -> CompiledStep[Any]:
    """Runs the same with and without replay, and demands the same; returns the last step of the replayed run."""
    found, steps = [], []

    def make(config: XLAConfig, function: Callable[..., Any]) -> CompiledStep[Any]:
        steps.append(CompiledStep(function, config=config))
        return steps[-1]

    for config in (XLAConfig(step_replay=False), XLAConfig(**{"step_replay": "auto", **options})):
        torch.manual_seed(0)
        found.append(_on_host(body(partial(make, config))))
    assert found[0] == found[1], (body.__name__, found, steps[-1].reasons)
    return steps[-1]


def _on_host(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return [_on_host(tensor) for tensor in value.state_dict().values()]
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().tolist()
    return [_on_host(item) for item in value] if isinstance(value, (list, tuple)) else copy.deepcopy(value)


def update_of(model: nn.Module, optimizer: Optimizer) -> Callable[..., torch.Tensor]:
    """A step that trains a model on the mean square of its outputs, and returns the loss."""

    def update(inputs: torch.Tensor) -> torch.Tensor:
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return update
