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


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * 2


def _by_function(logits: torch.Tensor) -> torch.Tensor:
    return _Twice.apply(logits)  # type: ignore[no-any-return, no-untyped-call]


def _by_hook(logits: torch.Tensor) -> torch.Tensor:
    logits.register_hook(lambda grad: grad * 2)
    return logits * 2


@isolated
@pytest.mark.parametrize("wrap", [xla_adapters.step, xla_adapters.CompiledStep])
@pytest.mark.parametrize("twice", [_by_function, _by_hook])
def test_python_gets_the_gradient_of_a_loss_that_torch_tpu_differentiates_itself(
    twice: Callable[[torch.Tensor], torch.Tensor], wrap: Callable[[Any], Any]
) -> None:
    def gradients(device: str, wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        weight, inputs = nn.Parameter(torch.randn(3, 4).to(device)), torch.randn(5, 3).to(device)
        classes = torch.arange(5, device=device) % 4

        def train() -> torch.Tensor:
            weight.grad = None
            loss = nn.functional.cross_entropy(twice(inputs @ weight), classes)
            (slope,) = torch.autograd.grad(loss, weight, create_graph=True)
            (loss + slope.square().sum()).backward()
            return loss.detach()

        step = wrap(train)
        found = [step().cpu() for _ in range(3)]
        assert weight.grad is not None
        return [*found, weight.grad.cpu()]

    expected = gradients("cpu", lambda train: train)
    xla_adapters.initialize()
    torch.testing.assert_close(gradients("tpu", wrap), expected, rtol=1e-5, atol=1e-6)


@isolated
def test_a_read_in_a_hook_is_an_error_with_the_line() -> None:
    xla_adapters.initialize()
    weight = nn.Parameter(torch.ones(3).to("tpu"))
    weight.register_hook(lambda grad: print(grad.sum().item()))
    with pytest.raises(TensorReadError) as caught, xla_adapters.step():
        (weight * 2).sum().backward()
    assert caught.value.filename == __file__
    assert weight.grad is None
