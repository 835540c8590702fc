"""A user's own accumulation on TorchTPU: micro-batches and the update are steps of their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import xla_adapters
from tests.isolation import isolated
from xla_adapters import CompiledStep

_UPDATES = 8


def _trained(device: str, count: int) -> tuple[list[float], int]:
    """The losses, and how many calls of the micro-batches' step were replayed."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)

    def micro(inputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(net(inputs), classes) / count
        loss.backward()
        return loss.detach()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    step, end = (CompiledStep(micro), CompiledStep(update)) if device == "tpu" else (micro, update)
    losses = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(_UPDATES):
        for _ in range(count):
            inputs, classes = torch.randn(6, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator)
            losses.append(float(step(inputs.to(device), classes.to(device))))
        end()
    return losses, step.replays if isinstance(step, CompiledStep) else 0


@pytest.mark.parametrize("count", [2, 3])
@isolated
def test_micro_batches_are_replayed_with_and_without_gradients_before_them(count: int) -> None:
    xla_adapters.initialize()
    losses, replays = _trained("tpu", count)
    assert losses == pytest.approx(_trained("cpu", count)[0], abs=1e-5)
    # All but the first two or three of each kind, and what verifies them.
    assert replays >= _UPDATES * count / 2


@isolated
def test_gradients_that_do_not_depend_on_the_weights() -> None:
    """The program computes them from the batch alone; the trace still needs the weights' shapes."""
    xla_adapters.initialize()
    net, plain = nn.Linear(4, 4).to("tpu"), nn.Linear(4, 4)
    batch = torch.arange(8.0).view(2, 4)
    for _ in range(3):
        with xla_adapters.step():
            net(batch.to("tpu")).sum().backward()
        plain(batch).sum().backward()
    assert net.weight.grad is not None
    assert torch.equal(net.weight.grad.cpu(), plain.weight.grad)  # type: ignore[arg-type]
    assert net.bias.grad.cpu().tolist() == plain.bias.grad.tolist()  # type: ignore[union-attr]
    # The values of the weights are still there.
    assert net.weight.detach().cpu().isfinite().all()
