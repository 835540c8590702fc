"""Python in the backward of a step on TorchTPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import xla_adapters
from tests.isolation import isolated
from xla_adapters import TensorReadError


class _Noting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, noted: torch.Tensor) -> torch.Tensor:
        ctx.noted = noted
        return value * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.noted.add_(grad.sum())
        return grad * 2, None


def _of_function(weight: nn.Parameter, noted: torch.Tensor) -> torch.Tensor:
    return _Noting.apply(weight, noted)  # type: ignore[no-any-return, no-untyped-call]


def _of_hook(weight: nn.Parameter, noted: torch.Tensor) -> torch.Tensor:
    def note(grad: torch.Tensor) -> None:
        noted.add_(grad.sum())

    result = weight * 2
    result.register_hook(note)
    return result


@isolated
@pytest.mark.parametrize("make", [_of_function, _of_hook])
@pytest.mark.parametrize("how", ["backward", "autograd.backward", "autograd.grad"])
def test_a_backward_in_python_writes_what_it_writes_on_the_cpu(
    make: Callable[[nn.Parameter, torch.Tensor], torch.Tensor], how: str
) -> None:
    xla_adapters.initialize()
    weight, noted = nn.Parameter(torch.ones(3).to("tpu")), torch.zeros(3).to("tpu")
    for number in (1, 2):
        with xla_adapters.step():
            total = make(weight, noted).sum()
            if how == "autograd.grad":
                (weight.grad,) = torch.autograd.grad(total, weight)
            elif how == "backward":
                total.backward()
            else:
                torch.autograd.backward(total)
        assert noted.tolist() == [3.0 * number] * 3
        assert weight.grad is not None
        assert weight.grad.tolist() == [2.0] * 3
        weight.grad = None


@isolated
def test_a_read_in_a_hook_is_an_error_with_the_line() -> None:
    xla_adapters.initialize()
    weight = nn.Parameter(torch.ones(3).to("tpu"))
    weight.register_hook(lambda grad: print(grad.sum().item()))
    with pytest.raises(TensorReadError) as caught, xla_adapters.step():
        (weight * 2).sum().backward()
    assert caught.value.filename == __file__
    assert weight.grad is None
