"""Functions that torch_xla traces by themselves: recurrent layers, `scan` and `scan_layers`."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import xla_adapters
from tests.device import DEVICE
from tests.support import update
from xla_adapters import CompiledStep, XLAConfig
from xla_adapters.runtime import eager

pytestmark = pytest.mark.isolated

RECURRENT: dict[str, dict[str, Any]] = {
    "GRU": {},
    "GRU of two layers": {"num_layers": 2},
    "LSTM": {},
    "LSTM in both directions": {"bidirectional": True},
    "RNN": {"num_layers": 2},
}


def _train(make: Any, device: str, replay: Any) -> list[float]:
    torch.manual_seed(0)
    layers = make(device == DEVICE).to(device)
    updates = torch.optim.SGD(layers.parameters(), lr=0.1)

    def step(inputs: torch.Tensor) -> torch.Tensor:
        return update(layers(inputs)[0].square().mean(), updates)

    call: Any = step if device == "cpu" else CompiledStep(step, config=XLAConfig(step_replay=replay))
    losses = []
    compiles: list[int] = []
    for number in range(6):
        inputs = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(number))
        with xla_adapters.count() as counters:
            losses.append(call(inputs))
        if device == DEVICE:
            compiles.append(counters.compiles)
    # What torch_xla traces in the first step is no part of its graph.
    assert not any(compiles[1:]), compiles
    return [float(loss) for loss in losses]


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_train_as_on_the_host(kind: str) -> None:
    xla_adapters.initialize()

    def make(on_device: bool) -> nn.Module:
        layer = getattr(nn, kind.split()[0])
        if not on_device:
            # The one that torch_xla has replaced by one for its devices only.
            layer = getattr(layer, "_orig", layer)
        layers: nn.Module = layer(5, 6, batch_first=True, **RECURRENT[kind])
        return layers

    expected = _train(make, "cpu", None)
    for replay in (False, "auto"):
        assert _train(make, DEVICE, replay) == pytest.approx(expected, abs=1e-5)


def test_scanned_layers_train_as_layers_one_by_one() -> None:
    xla_adapters.initialize()
    from torch_xla.experimental.scan_layers import scan_layers

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])

        def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor]:
            if inputs.device.type == DEVICE:
                return (scan_layers(self.layers, inputs),)
            return (nn.Sequential(*self.layers)(inputs),)

    expected = _train(lambda _: Layers(), "cpu", None)
    warnings.simplefilter("error", UserWarning)
    for replay in (False, "auto"):
        assert _train(lambda _: Layers(), DEVICE, replay) == pytest.approx(expected, abs=1e-5)


def test_the_error_of_a_step_is_seen_though_it_made_leaves() -> None:
    xla_adapters.initialize()
    with pytest.raises(ZeroDivisionError), xla_adapters.step():
        leaf = torch.ones(3, device=DEVICE).mul(2).detach().requires_grad_()
        (leaf * 2).sum().backward()
        raise ZeroDivisionError


def test_scanned_layers_outside_steps() -> None:
    xla_adapters.initialize()
    from torch_xla.experimental import eager_mode
    from torch_xla.experimental.scan_layers import scan_layers

    # Whoever switches eager mode on.
    eager_mode(False)
    with eager(True):
        pass
    eager_mode(True)
    layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])
    expected = nn.Sequential(*layers)(torch.ones(2, 5))
    expected.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in layers.parameters() if parameter.grad is not None]
    layers.zero_grad()
    layers.to(DEVICE)
    found = scan_layers(layers, torch.ones(2, 5, device=DEVICE))
    found.square().sum().backward()
    assert xla_adapters.get_runtime().tracing.eager()
    assert xla_adapters.get_runtime().tracing.pending_count() == 0
    torch.testing.assert_close(found.cpu(), expected)
    for parameter, gradient in zip(layers.parameters(), gradients, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.cpu(), gradient)
