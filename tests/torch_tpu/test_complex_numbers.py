"""Complex numbers on TorchTPU after `initialize()`: those of the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

import xla_adapters
from tests.isolation import isolated


@isolated
@pytest.mark.parametrize("transform", [torch.fft.fft, torch.fft.rfft])
def test_second_derivatives_of_fourier_transforms(transform: Callable[[torch.Tensor], torch.Tensor]) -> None:
    xla_adapters.initialize()
    found = []
    for device in ("cpu", "tpu"):
        values = torch.linspace(-1, 2, 8).to(device).requires_grad_()
        (slope,) = torch.autograd.grad(transform(values).abs().pow(3).sum(), values, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), values)[0].cpu())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-3)


@isolated
@pytest.mark.parametrize("in_step", [True, False])
def test_copies_of_conjugates_and_of_their_parts(in_step: bool) -> None:
    xla_adapters.initialize()
    values = torch.tensor([1 + 2j, 3 - 4j])
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        torch.conj,
        lambda tensor: tensor.conj().real,
        lambda tensor: tensor.conj().imag,
    ]
    copies: list[Callable[[torch.Tensor], torch.Tensor]] = [
        torch.clone,
        lambda tensor: torch.zeros_like(tensor).copy_(tensor),
        lambda tensor: tensor + 0,
        *([] if in_step else [torch.Tensor.cpu, copy.deepcopy]),
    ]
    for view in views:
        for copied in copies:

            def compute(tensor: torch.Tensor, view: object = view, copied: object = copied) -> torch.Tensor:
                assert callable(view)
                assert callable(copied)
                result: torch.Tensor = copied(view(tensor))
                return result

            expected = compute(values).resolve_conj().resolve_neg()
            found = (xla_adapters.step(compute) if in_step else compute)(values.to("tpu"))
            torch.testing.assert_close(found.cpu().resolve_conj().resolve_neg(), expected)
