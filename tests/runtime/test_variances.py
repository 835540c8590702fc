"""Norms of values whose mean is far from zero, which XLA's batch norm computes with a wrong variance."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional

import xla_adapters
from tests.isolation import isolated

_NORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "layer": lambda x: functional.layer_norm(x, (16,)),
    "group": lambda x: functional.group_norm(x, 2),
    "instance": functional.instance_norm,
    "batch": lambda x: functional.batch_norm(x, None, None, training=True),
    "batch of rows": lambda x: functional.batch_norm(x[..., 0], None, None, training=True),
    "of one value": lambda x: functional.layer_norm(x[..., :1], (1,)),
}


def _computed(norm: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor) -> list[torch.Tensor]:
    values = values.detach().requires_grad_()
    result = norm(values)
    (gradient,) = torch.autograd.grad(result.pow(3).mean(), values)
    return [result.detach(), gradient]


@isolated
@pytest.mark.parametrize("in_step", [True, False], ids=["step", "eager"])
def test_far_from_zero(in_step: bool) -> None:
    xla_adapters.initialize()
    for far in (0.0, 300.0, -2000.0):
        values = torch.randn(32, 4, 16) + far
        for name, norm in _NORMS.items():
            on_device = values.to("xla")
            with xla_adapters.step(name=f"{name} {far}") if in_step else nullcontext():
                found = _computed(norm, on_device)
            exact = _computed(norm, values.double())
            for ours, expected in zip(found, exact, strict=True):
                scale = expected.abs().max().item()
                difference = (ours.cpu() - expected).abs().max().item()
                # The mean itself is rounded to float32, which the gradient has.
                assert difference <= (1e-5 + 1e-7 * abs(far)) * scale + 1e-7, (name, far, difference, scale)
