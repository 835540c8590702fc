"""Indices of 32 and of 64 bits in one call."""

from __future__ import annotations

import torch

import xla_adapters
from tests.device import DEVICE
from tests.isolation import isolated


def _results(device: str) -> list[torch.Tensor]:
    table = torch.arange(12.0).view(3, 4).to(device).requires_grad_()
    rows = torch.tensor([0, 1, 0], device=device)
    columns = torch.tensor([1, 0, 1], dtype=torch.int32, device=device)
    (table[rows, columns] * torch.arange(3.0, device=device)).square().sum().backward()
    written = table.detach().clone()
    written[columns, rows] = 5.0
    added = table.detach().clone().index_put_((rows, columns), torch.ones(3, device=device), accumulate=True)
    assert table.grad is not None
    return [table.grad, written, added, table.detach()[columns[:, None], rows]]


@isolated
def test_they_are_read_and_written_as_on_the_cpu() -> None:
    xla_adapters.initialize()
    expected = _results("cpu")
    with xla_adapters.eager():
        outside = _results(DEVICE)
        with xla_adapters.step():
            inside = _results(DEVICE)
        for found in (outside, inside):
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one.cpu(), other)
