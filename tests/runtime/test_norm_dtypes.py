"""Norms of inputs that are narrower than the weights: the dtypes and values are the CPU's."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import xla_adapters
from tests.device import DEVICE
from tests.isolation import isolated

NORMS: dict[str, Any] = {
    "layer": lambda: nn.LayerNorm(8),
    "layer without bias": lambda: nn.LayerNorm(8, bias=False),
    "group": lambda: nn.GroupNorm(2, 8),
}


def _results(kind: str, device: str, dtype: torch.dtype, scope: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    norm = NORMS[kind]()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.uniform_()
    norm.to(device)
    inputs = torch.randn(4, 8).to(device, dtype).requires_grad_()
    with scope:
        result = norm(inputs)
        result.float().square().sum().backward()
    assert inputs.grad is not None
    return [result.detach().cpu(), inputs.grad.cpu(), norm.weight.grad.cpu()]


@pytest.mark.parametrize("kind", NORMS)
@isolated
def test_the_result_has_the_dtype_of_the_input(kind: str) -> None:
    with xla_adapters.eager():
        for dtype in (torch.bfloat16, torch.float16):
            expected = _results(kind, "cpu", dtype, nullcontext())
            for scope in (nullcontext(), xla_adapters.step()):
                torch.testing.assert_close(_results(kind, DEVICE, dtype, scope), expected, rtol=1e-2, atol=2e-2)
        with torch.inference_mode():
            assert NORMS[kind]().to(DEVICE)(torch.ones(4, 8, device=DEVICE)).dtype is torch.float32
