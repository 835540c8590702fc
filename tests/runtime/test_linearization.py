"""`torch.func.linearize` on the device: values and tangents as on the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import linearize
from torch.utils._pytree import tree_map

import xla_adapters
from tests.device import DEVICE
from tests.isolation import isolated


def _linearized(device: str, scope: Any) -> Any:
    factor, one, other = (t.to(device) for t in torch.arange(1.0, 10).view(3, 3).split(1))

    def function(one: Tensor, other: Tensor) -> dict[str, Any]:
        return {"product": (factor * one * other).sin(), "pair": (one * 3,)}

    with scope:
        value, tangent_of = linearize(function, one, other)
        tangents = [tangent_of(one, factor), tangent_of(factor, one * 2)]
    return tree_map(lambda tensor: tensor.cpu(), (value, tangents))


@isolated
def test_in_and_outside_of_steps() -> None:
    expected = _linearized("cpu", nullcontext())
    with xla_adapters.eager():
        for scope in (nullcontext(), xla_adapters.step()):
            torch.testing.assert_close(_linearized(DEVICE, scope), expected)


@isolated
def test_tangents_of_another_shape_are_refused_by_torch() -> None:
    xla_adapters.initialize()
    _, tangent_of = linearize(torch.sin, torch.ones(2, device=DEVICE))
    with pytest.raises(RuntimeError, match="doesn't match the shape"):
        tangent_of(torch.ones(3, device=DEVICE))
