"""Steps under a dispatch mode of the user's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import xla_adapters
from tests.device import DEVICE
from tests.isolation import isolated
from tests.support import update
from xla_adapters import CompiledStep, XLAConfig


class _Counting(TorchDispatchMode):
    seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def _train(device: str, replay: Any, optimizer: Any, mode: TorchDispatchMode) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).to(device)
    updates = optimizer(model.parameters(), lr=0.1)

    def step(inputs: torch.Tensor) -> torch.Tensor:
        return update(model(inputs).pow(3).mean(), updates)

    call: Any = step if device == "cpu" else CompiledStep(step, config=XLAConfig(step_replay=replay))
    losses = []
    for number in range(4):
        inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(number)).to(device)
        with mode:
            loss = call(inputs)
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@isolated
def test_a_mode_around_a_step_sees_its_operations_and_changes_nothing(optimizer: Any) -> None:
    xla_adapters.initialize()
    expected = _train("cpu", None, optimizer, _Counting())
    for replay in (False, "auto"):
        mode = _Counting()
        assert _train(DEVICE, replay, optimizer, mode) == pytest.approx(expected, abs=1e-5)
        assert mode.seen > 40


@isolated
def test_a_step_that_fails_under_a_mode_is_undone() -> None:
    xla_adapters.initialize()
    model = nn.Linear(3, 3).to(DEVICE)
    before = [parameter.detach().cpu() for parameter in model.parameters()]
    with _Counting(), pytest.raises(ZeroDivisionError), xla_adapters.step():
        model(torch.ones(2, 3, device=DEVICE)).sum().backward()
        with torch.no_grad():
            model.weight.mul_(3)
        raise ZeroDivisionError
    assert model.weight.grad is None
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.detach().cpu(), value)
