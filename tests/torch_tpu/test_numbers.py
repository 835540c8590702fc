"""Python numbers of a step that are not its optimizer's: constants of the program until they change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import xla_adapters
from tests.isolation import isolated
from xla_adapters import CompiledStep


def _net(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(device)


def _batches(device: str, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        inputs, classes = torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)
        yield inputs.to(device), classes.to(device)


@isolated
def test_a_number_that_stays_a_constant_is_the_cause_of_each_compile(caplog: pytest.LogCaptureFixture) -> None:
    xla_adapters.initialize()
    net = _net("tpu")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    weight = 0.0

    def train(inputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        outputs = net(inputs)
        loss = functional.cross_entropy(outputs, classes) + outputs.abs().pow(weight).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = CompiledStep(train)
    values = [0.25, 0.75, 0.5, 0.9, 0.1, 0.3]
    with caplog.at_level("INFO", logger="xla_adapters"):
        for value, batch in zip(values, _batches("tpu", len(values)), strict=True):
            weight = value
            step(*batch)
    said = [record.message for record in caplog.records if "compiled graph" in record.message]
    assert len(said) == len(values)
    for before, now, message in zip(values, values[1:], said[1:], strict=False):
        assert f"a Python number that is a part of the graph changed, in pow: {before} -> {now}" in message
        assert "make it a tensor in the step" in message


def _weighted(device: str, weights: Sequence[float]) -> Any:
    """The losses of a training with these weights of a penalty; and the step."""
    net = _net(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=len(weights))
    weight = 0.0

    def train(inputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        outputs = net(inputs)
        penalty = torch.add(outputs.square().mean(), 1 - weight, alpha=0.5)
        loss = functional.cross_entropy(outputs, classes) + weight * penalty / (3 - weight)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = CompiledStep(train) if device == "tpu" else train
    found = []
    for value, batch in zip(weights, _batches(device, len(weights)), strict=True):
        weight = value
        found.append(step(*batch).item())
        schedule.step()
    return found, step


@isolated
def test_numbers_that_change_become_inputs(caplog: pytest.LogCaptureFixture) -> None:
    weights = [number / 8 for number in range(16)]
    expected, _ = _weighted("cpu", weights)
    xla_adapters.initialize()
    with caplog.at_level("INFO", logger="xla_adapters"), xla_adapters.count() as counted:
        found, _ = _weighted("tpu", weights)
    assert found == pytest.approx(expected, rel=1e-5)
    assert counted.compiles == 4
    said = [record for record in caplog.records if "compiled graph" in record.message]
    assert all(record.levelname == "INFO" for record in said)
    assert all("has changed twice is an input of later graphs" in record.message for record in said[1:3])
    assert "from now on they cost no compile" in said[3].message


@isolated
def test_steps_are_replayed_while_such_a_number_stays() -> None:
    weights = [epoch / 4 for epoch in range(6) for _ in range(5)]
    expected, _ = _weighted("cpu", weights)
    xla_adapters.initialize()
    with xla_adapters.count() as counted:
        found, step = _weighted("tpu", weights)
    assert found == pytest.approx(expected, rel=1e-5)
    assert counted.compiles == 4
    assert counted.executions == len(weights)
    assert step.replays >= 2 * 6, step.reasons


@isolated
def test_in_half_precision_such_numbers_stay_constants(caplog: pytest.LogCaptureFixture) -> None:
    xla_adapters.initialize()
    net = _net("tpu").to(torch.bfloat16)
    weight = 0.0

    @xla_adapters.step
    def scaled(inputs: torch.Tensor) -> torch.Tensor:
        return (net(inputs.to(torch.bfloat16)) * weight).square().mean().float()

    with caplog.at_level("INFO", logger="xla_adapters"):
        for value, (inputs, _) in zip((0.1, 0.2, 0.3, 0.4), _batches("tpu", 4), strict=True):
            weight = value
            scaled(inputs)
    said = [record.message for record in caplog.records if "compiled graph" in record.message]
    assert len(said) == 4
    assert all("make it a tensor in the step" in message for message in said[1:])


@isolated
def test_a_number_that_the_step_makes_a_tensor_costs_no_compile() -> None:
    def losses(device: str) -> list[float]:
        net = _net(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        weight = 0.0

        def train(inputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
            outputs = net(inputs)
            scale = torch.tensor(weight, device=inputs.device)
            loss = functional.cross_entropy(outputs, classes) + scale * outputs.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step = CompiledStep(train) if device == "tpu" else train
        found = []
        for number, batch in enumerate(_batches(device, 12)):
            weight = number / 10
            found.append(step(*batch).item())
        return found

    expected = losses("cpu")
    xla_adapters.initialize()
    with xla_adapters.count() as counted:
        assert losses("tpu") == pytest.approx(expected, rel=1e-5)
    assert counted.compiles == 1
