"""Why a step compiles again: what changed, where, and what to do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import xla_adapters
from tests.device import DEVICE
from xla_adapters.errors import GraphLimitError
from xla_adapters.tracing.graph_history import CallNumber, GraphHistory, StepSignature
from xla_adapters.tracing.operation_log import OperationLog
from xla_adapters.tracing.scope_report import ScopeReport

pytestmark = pytest.mark.isolated


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
        self.model = Net().to(DEVICE)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.batch = torch.randn(6, 4)
        self.autocast, self.drops = False, True

    def step(self, name: str, **options: Any) -> None:
        batch = self.batch.to(DEVICE)
        with xla_adapters.step(name=name, **options):
            with torch.autocast(DEVICE, torch.bfloat16, enabled=self.autocast):
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


def _gradient_hook(training: Training) -> None:
    training.model.first.weight.register_hook(lambda gradient: gradient * 2)


def _update_hook(training: Training) -> None:
    def double(optimizer: Any, args: Any, kwargs: Any) -> None:
        for leaf in optimizer.param_groups[0]["params"]:
            leaf.grad.mul_(2)

    training.optimizer.register_step_pre_hook(double)


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
    "gradient hook": (_gradient_hook, "Linear has 1 hooks now; it had 0", "self.first"),
    "update hook": (_update_hook, "the step of AdamW has 1 hooks now; it had 0", "self.optimizer.step()"),
    "autocast": (_with("autocast", True), "Net runs under autocast to bfloat16 now", "self.model(batch)"),
    "option": (_decay, "AdamW changed: weight_decay: 0.01 -> 0.0", "self.optimizer.step()"),
    "optimizer": (_sgd, "the optimizer is SGD now; it was AdamW", "self.optimizer.step()"),
    "gradients": (_keep_gradients, "parameters of Linear have a gradient now", "self.first"),
}


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
            assert f"{__file__}:" in said, said
            assert line in said, said
            assert "what to do: " in said


def test_what_shapes_no_graph_is_not_blamed(caplog: pytest.LogCaptureFixture) -> None:
    """Gradients that the step drops first, switches, numbers that are copied, and what is made on the host."""
    caplog.set_level(logging.INFO, "xla_adapters")
    with xla_adapters.eager():
        training, scales = Training(), (0.4, 0.3, 2.0, 1.0)
        training.optimizer.param_groups[0]["lr"] = 0.04
        for index, scale in enumerate(scales):
            batch = training.batch.to(DEVICE)
            with xla_adapters.step(name="train"):
                if not index:
                    torch.tensor(0.0).to(DEVICE)
                    batch.to(DEVICE)
                torch.set_grad_enabled(bool(torch.tensor(index != 1)) or True)
                logged = torch.tensor(float(index % 2), device=DEVICE)
                loss = training.model(batch).square().mean() * scale
                twice = loss.detach() * 2
                training.optimizer.zero_grad()
                loss.backward()
                training.optimizer.step()
            assert (logged.item(), twice.item()) == (float(index % 2), 2 * loss.item())
    _, equal, constant = [message for message in caplog.messages if message.startswith("train: ")]
    assert "are equal now: equal Python numbers share one input" in equal
    assert "loss.detach() * 2" in equal
    assert "in mul: 2.0 -> 1.0" in constant
    assert "* scale" in constant


def test_a_cast_of_a_batch_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """The results are the same whatever the dtype of the batch is."""
    xla_adapters.initialize()
    caplog.set_level(logging.WARNING, "xla_adapters")
    layer = nn.Linear(4, 2).to(DEVICE)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.float16):
        batch = {"image": torch.ones(3, 4, dtype=dtype).to(DEVICE), "label": torch.zeros(3, 2).to(DEVICE)}
        with xla_adapters.step(name="cast"):
            torch.where(batch["label"] == 0, layer(batch["image"].float()), batch["label"]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    first, second = caplog.messages
    assert 'batch["image"], which float gets, has another dtype: float32 -> bfloat16' in first.replace("'", '"')
    assert "-> float16" in second
    assert f"{__file__}:" in first
    assert "convert the data to one dtype" in first


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
                training.model(training.batch.to(DEVICE))
        training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=0.07)
        training.step("train")
    assert caplog.messages == []


def test_the_limit_says_why() -> None:
    with xla_adapters.eager():
        training = Training()
        training.step("limited", max_graphs=1)
        training.model.kept = 2
        with pytest.raises(
            GraphLimitError, match=r"in topk: 3 -> 2\n  where: .*test_recompiles.py:\d+: .*\n  what to do"
        ):
            training.step("limited", max_graphs=1)


def test_another_graph_is_an_error_on_request() -> None:
    with xla_adapters.eager():
        training = Training()
        for _ in range(3):
            training.step("strict", on_recompile="error")
        # Another phase of the same step may have a graph of its own.
        with xla_adapters.step(name="strict", on_recompile="error"), torch.no_grad():
            training.model(training.batch.to(DEVICE))
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


def test_another_graph_is_no_warning_on_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "xla_adapters")
    with xla_adapters.eager():
        training = Training()
        training.step("quiet", on_recompile="ignore")
        training.model.kept = 2
        training.step("quiet", on_recompile="ignore")
    (said,) = [record for record in caplog.records if "in topk: 3 -> 2" in record.message]
    assert said.levelno == logging.INFO


def _batches_are_explained(caplog: pytest.LogCaptureFixture, first: dict[str, Any], second: dict[str, Any]) -> str:
    """What is said of a second batch."""
    caplog.clear()

    @xla_adapters.CompiledStep
    def step(batch: dict[str, Any]) -> torch.Tensor:
        return sum(value.float().sum() for value in batch.values() if isinstance(value, torch.Tensor))

    step(first)
    step(second)
    (said,) = caplog.messages
    return said


def test_remedies_of_batches_are_those_of_the_change(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "xla_adapters")
    x = torch.ones(4, 3)
    with xla_adapters.eager():
        shape = _batches_are_explained(caplog, {"x": x}, {"x": torch.ones(4, 2)})
        assert "x: (4, 3) float32 -> (4, 2) float32" in shape
        assert "what to do: pad to a fixed length" in shape
        last = _batches_are_explained(caplog, {"x": x, "y": x[:, 0]}, {"x": x[:2], "y": x[:2, 0]})
        assert "y: (4,) float32 -> (2,) float32" in last
        assert "what to do: if it is the smaller last batch of an epoch, leave it out by drop_last=True" in last
        longer = _batches_are_explained(caplog, {"x": x, "y": x[:, 0]}, {"x": torch.ones(2, 4), "y": x[:2, 0]})
        assert "what to do: pad to a fixed length" in longer
        dtype = _batches_are_explained(caplog, {"x": x}, {"x": x.byte()})
        assert "x: (4, 3) float32 -> (4, 3) uint8" in dtype
        assert "what to do: convert the data to one dtype" in dtype
        both = _batches_are_explained(caplog, {"x": x}, {"x": torch.ones(2, 3).byte()})
        assert "what to do: pad to a fixed length" in both
        key = _batches_are_explained(caplog, {"x": x}, {"x": x, "weights": x})
        assert "weights: absent -> (4, 3) float32" in key
        assert "what to do: give the same entries in each batch" in key


@pytest.mark.parametrize("follows_advice", [False, True])
def test_a_slice_that_moves(caplog: pytest.LogCaptureFixture, follows_advice: bool) -> None:
    caplog.set_level(logging.WARNING, "xla_adapters")
    with xla_adapters.eager():
        table, x = torch.randn(32, 4).to(DEVICE).requires_grad_(), torch.randn(4, 4).to(DEVICE)
        expected = table.detach().cpu()
        for start in (5, 9, 17):
            with xla_adapters.step(name="slices"):
                if follows_advice:
                    rows = table[torch.tensor(start, device=x.device) + torch.arange(4, device=x.device)]
                else:
                    rows = table[start : start + 4]
                result = rows + x
                result.sum().backward()
                table.grad = None
            assert torch.equal(result.detach().cpu(), expected[start : start + 4] + x.cpu())
    if follows_advice:
        assert caplog.messages == []
    else:
        assert "in indexing: 5 -> 9" in caplog.messages[0]
        assert "x[torch.tensor(start, device=x.device) + torch.arange(n, device=x.device)]" in caplog.messages[0]


def test_numbers_that_meet_by_chance(caplog: pytest.LogCaptureFixture) -> None:
    """A schedule of the momentum: at 0.9 it equals what batch norm computes of its own momentum of 0.1."""
    caplog.set_level(logging.INFO, "xla_adapters")
    with xla_adapters.eager():
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).to(DEVICE)
        optimizer = torch.optim.RMSprop(model.parameters(), lr=0.03, momentum=0.95)
        for momentum in (0.95, 0.93, 0.8999999999999999, 0.88):
            optimizer.param_groups[0]["momentum"] = momentum
            batch = torch.randn(6, 4).to(DEVICE)
            with xla_adapters.step(name="meets"):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    first, second = (record for record in caplog.records if "meets: compiled graph" in record.message)
    assert "0.8999999999999999 in RMSprop and 1 - 0.1 in batch_norm" in second.message, second.message
    assert second.levelno == first.levelno == logging.INFO


def test_another_path_within_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """The first update of averaged weights copies; the others average."""
    caplog.set_level(logging.WARNING, "xla_adapters")
    with xla_adapters.eager():
        model = nn.Linear(4, 2).to(DEVICE)
        decay = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=decay)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            with xla_adapters.step(name="averages"):
                model(torch.randn(6, 4).to(DEVICE)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                average.update_parameters(model)
    (said,) = caplog.messages
    assert "takes another path: the line calls foreach_lerp now" in said, said
    assert "average.update_parameters(model)" in said
    assert "move it behind the step" in said


def test_what_needs_no_action_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A compile whose reason the caller knows."""
    caplog.set_level(logging.INFO, "xla_adapters")
    history, signature = GraphHistory(), StepSignature()
    report = ScopeReport(compiles=1, compile_seconds=1.0, operations=OperationLog())
    history.ended("verified", signature, report)
    history.ended("verified", signature, report, CallNumber(9), "it was traced to verify replays")
    history.ended("verified", signature, report, CallNumber(10))
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.INFO, logging.WARNING]
    assert caplog.messages[1].endswith("(call 9): it was traced to verify replays")
