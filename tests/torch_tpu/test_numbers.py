"""Python numbers of a step that are not its optimizer's: constants of the program, unless made tensors in the step."""

from __future__ import annotations

from collections.abc import Iterator

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
def test_a_number_of_the_loss_that_changes_is_the_cause_of_a_compile(caplog: pytest.LogCaptureFixture) -> None:
    xla_adapters.initialize()
    net = _net("tpu")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    weight = 0.0

    def train(inputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        outputs = net(inputs)
        loss = functional.cross_entropy(outputs, classes) + weight * (0.5 * outputs).square().mean()
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
        assert f"a Python number that is a part of the graph changed, in mul: {before} -> {now}" in message
        assert "make it a tensor in the step" in message


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
