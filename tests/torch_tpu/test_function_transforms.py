"""`torch.func` on TorchTPU, in steps and out of them: the numbers of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.functional import cross_entropy

import xla_adapters
from tests.isolation import isolated
from xla_adapters import CompiledStep, get_runtime

_Weights = dict[str, torch.Tensor]


def _net(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)


def _results(device: str) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    net = _net(device)
    torch.manual_seed(1)
    inputs, classes = torch.randn(5, 4).to(device), torch.randint(0, 3, (5,)).to(device)
    scores = torch.randn(5, 3).to(device)
    weights = {name: value.detach() for name, value in net.named_parameters()}

    def square(weights: _Weights, inputs: torch.Tensor) -> torch.Tensor:
        return functional_call(net, weights, (inputs,)).square().mean()

    def loss(weights: _Weights) -> torch.Tensor:
        return cross_entropy(functional_call(net, weights, (inputs,)), classes)

    def of_scores(scores: torch.Tensor) -> torch.Tensor:
        return cross_entropy(scores * scores, classes)

    def adapted() -> torch.Tensor:
        """The gradient of a loss after one update."""
        net.zero_grad()
        own = dict(net.named_parameters())
        slopes = grad(loss)(own)
        loss({name: value - 0.1 * slopes[name] for name, value in own.items()}).backward()
        found = net[0].weight.grad.clone()  # type: ignore[index]
        net.zero_grad()
        return found

    def written(row: torch.Tensor) -> torch.Tensor:
        copy = row.clone()
        copy[1] = 0
        copy.mul_(2)
        return copy

    of_sample = grad(lambda weights, row: square(weights, row[None]))
    yield "the gradient of a functional call", lambda: grad(loss)(weights)["0.weight"]
    yield "of the parameters themselves", lambda: grad(loss)(dict(net.named_parameters()))["0.weight"].detach()
    yield "of each sample", lambda: vmap(of_sample, in_dims=(None, 0))(weights, inputs)["0.weight"]
    yield "through a gradient", adapted
    yield "a module for each sample", lambda: vmap(net)(inputs).detach()
    yield "in place", lambda: vmap(written)(inputs)
    yield "another dimension", lambda: vmap(torch.sin, in_dims=1, out_dims=1)(inputs)
    yield "jacrev", lambda: jacrev(torch.sin)(scores)
    yield "jacfwd", lambda: jacfwd(torch.sin)(scores)
    yield "hessian", lambda: hessian(of_scores)(scores)
    yield "jacrev of jacrev", lambda: jacrev(jacrev(of_scores))(scores)
    yield "jvp of a gradient", lambda: jvp(grad(of_scores), (scores,), (scores,))[1]
    yield "vjp", lambda: vjp(of_scores, scores)[1](torch.ones((), device=device))[0]
    yield "hessian of repeated rows", lambda: hessian(lambda rows: (rows.repeat_interleave(2) ** 3).sum())(scores)


@isolated
@pytest.mark.parametrize("in_step", [True, False])
def test_transforms(in_step: bool) -> None:
    expected = {name: compute() for name, compute in _results("cpu")}
    xla_adapters.initialize()
    counters = get_runtime().counters
    for name, compute in _results("tpu"):
        before = counters.metrics().executions
        found = xla_adapters.step(compute)() if in_step else compute()
        torch.testing.assert_close(found.cpu(), expected[name], rtol=0, atol=1e-5, msg=name)
        assert counters.metrics().executions - before == in_step


@isolated
def test_training_through_transforms_is_replayed() -> None:
    losses: list[list[float]] = []
    for device in ("cpu", "tpu"):
        if device == "tpu":
            xla_adapters.initialize()
        train, step = _training(device)
        batches = torch.Generator().manual_seed(2)
        losses.append([train(torch.randn(5, 4, generator=batches).to(device)).item() for _ in range(6)])
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=1e-5)
    assert step is not None
    assert step.replays == 4


def _training(device: str) -> tuple[Callable[[torch.Tensor], torch.Tensor], CompiledStep[torch.Tensor] | None]:
    net = _net(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)

    def loss(weights: _Weights, inputs: torch.Tensor) -> torch.Tensor:
        return (functional_call(net, weights, (inputs,)) - 1).square().mean()

    def train(inputs: torch.Tensor) -> torch.Tensor:
        weights: dict[str, Any] = dict(net.named_parameters())
        slopes = grad(loss)(weights, inputs)
        value = loss({name: weight - 0.1 * slopes[name] for name, weight in weights.items()}, inputs)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    if device == "cpu":
        return train, None
    step = CompiledStep(train, config=xla_adapters.XLAConfig(step_replay=True))
    return step, step
