"""Slices with any bounds, windows and writes, in eager mode and in a step, with their gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import xla_adapters
from tests.isolation import isolated
from xla_adapters.replay.compiled_step import CompiledStep

_Function = Callable[[torch.Tensor], torch.Tensor]


def _written(values: torch.Tensor, part: slice) -> torch.Tensor:
    values = values.clone()
    values[:, part] = 3.0
    return values * 2


def _masked(values: torch.Tensor) -> torch.Tensor:
    values = values.clone()
    # The mask is on the host.
    values[torch.arange(2) % 2 == 0] = 0.5
    return values * 2


def _reduced(values: torch.Tensor) -> torch.Tensor:
    """The index is longer than what is written to."""
    index = torch.arange(16, device=values.device).remainder(4).expand(2, 16)
    return values[:, :4].scatter_reduce(1, index, values, "sum", include_self=False)


_FUNCTIONS: dict[str, _Function] = {
    "from before the first": lambda values: values[:, -100:],
    "to before the first": lambda values: values[:, :-100],
    "from before, in steps": lambda values: values[:, -100:100:3],
    "an ellipsis": lambda values: values[..., -17:-1],
    "written": lambda values: _written(values, slice(-100, -3)),
    "nothing written": lambda values: _written(values, slice(None, -100)),
    "masked": _masked,
    "reduced": _reduced,
    "scattered": lambda values: torch.slice_scatter(values, values[:, :4] * 2, 1, -100, -12),
    "windows": lambda values: values.unfold(1, 4, 2),
    "windows of the first dimension": lambda values: values.unfold(0, 2, 1),
    "windows that overlap not": lambda values: values.unfold(-1, 3, 5),
}


@isolated
@pytest.mark.parametrize("name", list(_FUNCTIONS))
def test_as_on_the_host(name: str) -> None:
    xla_adapters.initialize()
    function = _FUNCTIONS[name]
    values = torch.arange(32.0).reshape(2, 16)
    assert torch.equal(function(values.to("xla")).cpu(), function(values))

    def with_gradient(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = values.clone().requires_grad_()
        result = function(values)
        result.square().sum().backward()
        assert values.grad is not None
        return result.detach(), values.grad

    found = CompiledStep(with_gradient)(values.to("xla"))
    for one, other in zip(found, with_gradient(values), strict=True):
        assert torch.equal(one.cpu(), other)
