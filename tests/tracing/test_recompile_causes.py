"""Faults as people make them: what a recompile is put down to, its line, and that the remedy helps."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

import xla_adapters
from tests.device import DEVICE
from xla_adapters import StepScope, XLAConfig
from xla_adapters.tracing.graph_history import GraphHistory, StepSignature
from xla_adapters.tracing.scope_report import ScopeReport

pytestmark = pytest.mark.isolated

Losses = Callable[[torch.Tensor, int], torch.Tensor]


def _train(name: str, losses: Losses, *, steps: int = 4, config: XLAConfig | None = None) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(steps):
        inputs = torch.randn(6, 4).to(DEVICE)
        with xla_adapters.step(name=name, config=config):
            losses(model(inputs), index).backward()
            optimizer.step()
            optimizer.zero_grad()


def _growing() -> Losses:
    seen: list[torch.Tensor] = []

    def loss(out: torch.Tensor, index: int) -> torch.Tensor:
        seen.append(out.detach().mean(0))
        return out.square().mean() * torch.stack(seen).mean()

    return loss


def _of_fixed_size() -> Losses:
    memory = torch.zeros(4, 3).to(DEVICE)

    def loss(out: torch.Tensor, index: int) -> torch.Tensor:
        memory[torch.tensor([index], device=out.device)] = out.detach().mean(0)
        return out.square().mean() * memory.mean()

    return loss


def _order(out: torch.Tensor, index: int) -> torch.Tensor:
    terms = [torch.exp, torch.abs] if index % 2 else [torch.abs, torch.exp]
    return torch.stack([term(out).mean() for term in terms]).sum()


def _selected(out: torch.Tensor, index: int) -> torch.Tensor:
    large = out[:, 0] > 0
    return out[large].square().mean()


def _weighted(out: torch.Tensor, index: int) -> torch.Tensor:
    large = out[:, :1] > 0
    return torch.where(large, out.square(), 0).sum() / (3 * large.sum())


def _converted(out: torch.Tensor, index: int) -> torch.Tensor:
    return out.to(torch.bfloat16 if index > 1 else torch.float32).float().mean()


def test_faults_as_people_make_them(caplog: pytest.LogCaptureFixture) -> None:
    xla_adapters.initialize()
    caplog.set_level(logging.WARNING, "xla_adapters")
    warns = XLAConfig(on_graph_break="warn")
    cases: list[tuple[Losses, str, str]] = [
        (_growing(), "stack gets 2 values now; it got 1", "torch.stack(seen)"),
        (_order, "the same calls in another order: it comes to exp", "term(out).mean()"),
        (_selected, "the result of indexing has another shape", "out[large]"),
        (_converted, "a dtype that is a part of the graph changed, in to", "out.to("),
    ]
    for number, (losses, cause, line) in enumerate(cases):
        caplog.clear()
        _train(f"fault {number}", losses, config=warns)
        assert cause in "".join(caplog.messages[:1]), (cause, caplog.messages)
        assert line in caplog.messages[0]
        assert "what to do: " in caplog.messages[0]
    caplog.clear()
    # As the remedies of the first and the third have it.
    _train("of fixed size", _of_fixed_size(), config=warns)
    _train("weighted", _weighted, config=warns)
    assert caplog.messages == []


def test_an_optimizer_that_has_lost_its_parameters(caplog: pytest.LogCaptureFixture) -> None:
    xla_adapters.initialize()
    caplog.set_level(logging.WARNING, "xla_adapters")
    model = nn.Linear(4, 2).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(4):
        if index == 2:
            model.cpu().to(DEVICE)
        with xla_adapters.step(name="moved"):
            model(torch.ones(3, 4).to(DEVICE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "SGD updates 0 parameters now; it updated 2" in caplog.messages[0]
    assert "make the optimizer again" in caplog.messages[0]


@pytest.mark.parametrize("with_closure", [False, True])
def test_other_parameters_with_a_gradient(with_closure: bool, caplog: pytest.LogCaptureFixture) -> None:
    xla_adapters.initialize()
    caplog.set_level(logging.WARNING, "xla_adapters")
    heads = nn.ModuleList([nn.Linear(4, 2), nn.Sequential(nn.Linear(4, 2), nn.Tanh())]).to(DEVICE)
    optimizer = torch.optim.SGD(heads.parameters(), lr=0.1)
    for index in (0, 0, 1):

        def closure(index: int = index) -> torch.Tensor:
            optimizer.zero_grad()
            outputs = [head(torch.ones(3, 4).to(DEVICE)) for head in heads]
            loss = outputs[index].square().mean()
            loss.backward()
            return loss

        with xla_adapters.step(name="heads"):
            if with_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
    (said,) = caplog.messages
    assert "SGD updates other parameters now: number 2 of those" in said
    assert "number 0 has none any more" in said


def test_a_closure_that_computes_with_fewer_rows(caplog: pytest.LogCaptureFixture) -> None:
    """The gradients of the step before, which a closure drops, are not those of its update."""
    xla_adapters.initialize()
    caplog.set_level(logging.WARNING, "xla_adapters")
    model = nn.Linear(4, 2).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in (6, 5):

        def closure(rows: int = rows) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(6, 4).to(DEVICE))[:rows].square().mean()
            loss.backward()
            return loss

        with xla_adapters.step(name="rows"):
            optimizer.step(closure)
    (said,) = caplog.messages
    assert "a Python number that is a part of the graph changed, in indexing: 6 -> 5" in said


def test_a_step_that_was_split() -> None:
    logs = []
    for reads in (False, True):
        with StepScope(config=XLAConfig(on_graph_break="warn")) as scope:
            result = torch.ones(3).to(DEVICE) + 1
            if reads:
                result.sum().item()
        assert scope.operations.was_split == reads
        logs.append(scope.operations)
    logs[1].entries = logs[0].entries
    history, signature = GraphHistory(), StepSignature()
    history.ended("step", signature, ScopeReport(compiles=1, compile_seconds=1.0, operations=logs[0]))
    assert "a part of the step was executed before its end" in history.reason(signature, logs[1])
    assert "a part of the step" not in history.reason(signature, logs[0])
