"""Why a step compiles again: what changed, where, and what to do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import xla_adapters
from tests.isolation import isolated
from xla_adapters.errors import GraphLimitError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2)
        self.scale, self.kept, self.order, self.bounded = 0.5, 3, "as it is", False

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(torch.relu(self.first(batch)))
        if self.bounded:
            hidden = hidden.tanh()
        hidden = hidden.flip(1) if self.order == "reversed" else hidden
        hidden = hidden + hidden.topk(self.kept, 1).values.sum(1, keepdim=True)
        return self.last(hidden) * self.scale


class Training:
    """A loop whose parts may be changed between two steps."""

    def __init__(self) -> None:
        self.model = Net().to("xla")
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.batch = torch.randn(6, 4)
        self.autocast, self.drops = False, True

    def step(self, name: str, **options: Any) -> None:
        batch = self.batch.to("xla")
        with xla_adapters.step(name=name, **options):
            with torch.autocast("xla", torch.bfloat16, enabled=self.autocast):
                loss = self.model(batch).square().mean()
            loss.backward()
            self.optimizer.step()
            if self.drops:
                self.optimizer.zero_grad()


def _with(name: str, value: Any) -> Callable[[Training], Any]:
    return lambda training: setattr(training, name, value)


def _with_model(name: str, value: Any) -> Callable[[Training], Any]:
    return lambda training: setattr(training.model, name, value)


def _hook(training: Training) -> None:
    training.model.first.register_forward_hook(lambda module, args, output: output * 2)


def _decay(training: Training) -> None:
    training.optimizer.param_groups[0]["weight_decay"] = 0.0


def _sgd(training: Training) -> None:
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)


def _keep_gradients(training: Training) -> None:
    training.drops = False
    training.step("keeps gradients")


# What is changed, what is said, and the text of the line that is named.
CHANGES: dict[str, tuple[Callable[[Training], Any], str, str]] = {
    "shape": (_with("batch", torch.randn(5, 4)), "linear has another shape: (6, 8) -> (5, 8)", "self.first(batch)"),
    "float": (_with_model("scale", 1.0), "in mul: 0.5 -> 1.0", "* self.scale"),
    "integer": (_with_model("kept", 2), "in topk: 3 -> 2", "self.kept"),
    "string": (_with_model("order", "reversed"), "takes another path: it comes to flip", "hidden.flip(1)"),
    "bool": (_with_model("bounded", True), "takes another path: it comes to tanh", "hidden.tanh()"),
    "mode": (lambda training: training.model.eval(), "Net is in eval mode now", "self.model(batch)"),
    "rate": (lambda training: setattr(training.model.dropout, "p", 0.3), "in dropout: 0.1 -> 0.3", "self.dropout"),
    "frozen": (lambda training: training.model.first.requires_grad_(False), "Linear are frozen now", "self.first"),
    "hook": (_hook, "Linear has 1 hooks now; it had 0", "self.first"),
    "autocast": (_with("autocast", True), "another dtype: float32 -> bfloat16", "self.first"),
    "option": (_decay, "AdamW changed: weight_decay: 0.01 -> 0.0", ""),
    "optimizer": (_sgd, "the optimizer is SGD now; it was AdamW", ""),
    "gradients": (_keep_gradients, "parameters of Linear have a gradient now", "self.first"),
}


@isolated
def test_what_changed_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "xla_adapters")
    with xla_adapters.eager():
        for name, (change, cause, line) in CHANGES.items():
            training = Training()
            training.step(name)
            training.step(name)
            assert not caplog.messages, name
            change(training)
            caplog.clear()
            training.step(name)
            (said,) = caplog.messages
            caplog.clear()
            assert cause in said, said
            assert f"{__file__}:" in said or not line, said
            assert line in said, said
            assert "what to do: " in said


@isolated
def test_nothing_is_said_of_what_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Numbers that are inputs of the graph, another optimizer with the same graph, and steps at several places."""
    caplog.set_level(logging.WARNING, "xla_adapters")
    with xla_adapters.eager():
        training = Training()
        training.optimizer.param_groups[0]["lr"] = 0.04
        for index in range(20):
            training.model.scale = 0.3 + index / 100
            training.optimizer.param_groups[0]["lr"] = 0.03 / (1 + index)
            training.step("train")
            with xla_adapters.step(name="train"), torch.no_grad():
                training.model(training.batch.to("xla"))
        training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=0.07)
        training.step("train")
    assert caplog.messages == []


@isolated
def test_the_limit_says_why() -> None:
    with xla_adapters.eager():
        training = Training()
        training.step("limited", max_graphs=1)
        training.model.kept = 2
        with pytest.raises(
            GraphLimitError, match=r"in topk: 3 -> 2\n  where: .*test_recompiles.py:\d+: .*\n  what to do"
        ):
            training.step("limited", max_graphs=1)


@isolated
def test_another_graph_is_an_error_on_request() -> None:
    with xla_adapters.eager():
        training = Training()
        for _ in range(3):
            training.step("strict", on_recompile="error")
        # Another phase of the same step may have a graph of its own.
        with xla_adapters.step(name="strict", on_recompile="error"), torch.no_grad():
            training.model(training.batch.to("xla"))
        weights = [parameter.detach().cpu().clone() for parameter in training.model.parameters()]
        training.model.kept = 2
        with pytest.raises(
            GraphLimitError, match=r"on_recompile='error': .*in topk: 3 -> 2\n  where: .*\n  what to do"
        ):
            training.step("strict", on_recompile="error")
        for before, parameter in zip(weights, training.model.parameters(), strict=True):
            assert torch.equal(before, parameter.detach().cpu())
        training.model.kept = 3
        training.step("strict", on_recompile="error")


@isolated
def test_another_graph_is_no_warning_on_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "xla_adapters")
    with xla_adapters.eager():
        training = Training()
        training.step("quiet", on_recompile="ignore")
        training.model.kept = 2
        training.step("quiet", on_recompile="ignore")
    (said,) = [record for record in caplog.records if "in topk: 3 -> 2" in record.message]
    assert said.levelno == logging.INFO
