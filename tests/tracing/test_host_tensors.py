"""Tensors on the host inside a step: numbers work as in torch, others are named with the line of the user."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import xla_adapters
from xla_adapters.errors import HostTensorError

pytestmark = pytest.mark.isolated

_Two = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_NUMBERS: dict[str, _Two] = {
    "sum": lambda x, s: x + s,
    "power": lambda x, s: s**x,
    "where": lambda x, s: torch.where(x > 0.5, x, s),
    "clamp": lambda x, s: x.clamp(min=s),
    "clamp, both": lambda x, s: torch.clamp(x, s * 0, s),
    "lerp": lambda x, s: torch.lerp(x, x * 2, s),
    "floor": lambda x, s: x // s,
    "remainder": lambda x, s: s % x,
    "fmax": torch.fmax,
    "atan2": lambda x, s: torch.atan2(s, x),
    "copysign": lambda x, s: torch.copysign(x, -s),
    "logaddexp": torch.logaddexp,
    "xlogy": torch.xlogy,
    "heaviside": lambda x, s: torch.heaviside(x - 0.5, s),
    "filled": lambda x, s: x.masked_fill(x > 0.5, s),
    "rows filled": lambda x, s: x.index_fill(0, torch.tensor([0], device=x.device), s),
}


@pytest.mark.parametrize("in_step", [True, False], ids=["step", "eager"])
def test_numbers_on_the_host(in_step: bool) -> None:
    xla_adapters.initialize()
    x, number = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) + 0.1, torch.tensor(0.7)
    for name, call in _NUMBERS.items():
        if in_step:
            with xla_adapters.step():
                found = call(x.to("xla"), number)
        else:
            found = call(x.to("xla"), number)
        torch.testing.assert_close(
            found.cpu(), call(x, number), rtol=1e-5, atol=1e-6, msg=lambda text, at=name: f"{at}: {text}"
        )


_REFUSED: dict[str, tuple[_Two, str]] = {
    "product": (lambda x, y: x @ y, r"matmul .* argument 2 \(float32\[3, 3\]\)"),
    "list": (lambda x, y: torch.cat([x, y]), r"cat .* argument 1 \(float32\[3, 3\]\)"),
    "named": (lambda x, y: functional.mse_loss(input=x, target=y), "mse_loss .* target"),
    "bounds": (lambda x, y: torch.clamp(x, y), "clamp .* argument 2"),
    "index": (lambda x, y: x.gather(0, y.long()), "gather .* argument 3"),
    "module": (lambda x, y: nn.Linear(3, 3)(x), r"linear .* argument 2 .*, argument 3 \(float32\[3\]\)"),
    "recurrent": (lambda x, y: nn.LSTM(3, 3).to(x.device)(y)[0], "lstm .* argument 1"),
}


def test_others_are_named() -> None:
    xla_adapters.initialize()
    x, y = torch.rand(3, 3).to("xla"), torch.rand(3, 3)
    for call, message in _REFUSED.values():
        with pytest.raises(HostTensorError, match=message) as caught, xla_adapters.step():
            call(x, y)
        assert f"{__file__}:{call.__code__.co_firstlineno}" in str(caught.value)
        assert "what to do" in str(caught.value)
        assert isinstance(caught.value.__cause__, RuntimeError)
    with xla_adapters.step():
        total = (x @ y.to("xla")).sum()
    assert total.isfinite().item()


@pytest.mark.parametrize("given", [torch.Size((3, 3)), torch.Size((8, 3, 32))])
def test_a_convolution_is_not_computed_on_the_host(given: torch.Size) -> None:
    """torch refuses a large input with words of its own, and computes a small one on the host."""
    xla_adapters.initialize()
    layer = nn.Conv1d(3, 2, 1).to("xla")
    with pytest.raises(HostTensorError, match=r"conv1d .* argument 1 \(float32"), xla_adapters.step():
        layer(torch.rand(given))
    with xla_adapters.step():
        found = layer(torch.rand(given).to("xla"))
    assert found.isfinite().all().item()


def test_other_errors_stay_as_they_are() -> None:
    xla_adapters.initialize()
    with pytest.raises(RuntimeError, match="size") as caught, xla_adapters.step():
        torch.rand(3, 3).to("xla").view(2, 5)
    assert not isinstance(caught.value, HostTensorError)
