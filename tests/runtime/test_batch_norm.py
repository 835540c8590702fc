"""Batch norm outside of steps: torch_xla's own updates the running variance with the biased one of the batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import xla_adapters
from tests.isolation import isolated


def _trained(device: str, momentum: float | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3, momentum=momentum).to(device)
    found = []
    for _ in range(3):
        images = torch.randn(2, 3, 2, 2).to(device).requires_grad_()
        result = norm(images)
        result.pow(3).sum().backward()
        assert images.grad is not None
        found += [result.detach().cpu(), images.grad.cpu()]
    # As `swa_utils.update_bn` does.
    with torch.no_grad():
        found.append(norm(torch.randn(2, 3, 2, 2).to(device)).cpu())
    assert norm.weight.grad is not None
    return [*found, norm.weight.grad.cpu(), *(buffer.cpu() for buffer in norm.buffers())]


@isolated
@pytest.mark.parametrize("momentum", [0.1, None])
def test_as_on_the_host(momentum: float | None) -> None:
    xla_adapters.initialize()
    for found, expected in zip(_trained("xla", momentum), _trained("cpu", momentum), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
