"""Python in the backward of a step on TorchTPU, averaging batch norms, and a version that is not known."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import xla_adapters
from tests.isolation import isolated
from xla_adapters import CompiledStep, TensorReadError, get_runtime


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


@isolated
def test_a_batch_norm_that_averages_over_all_batches() -> None:
    found = []
    for device in ("cpu", "tpu"):
        if device == "tpu":
            xla_adapters.initialize()
        norm = nn.BatchNorm1d(4, momentum=None).to(device)
        step = CompiledStep(lambda inputs, norm=norm: norm(inputs).sum().detach()) if device == "tpu" else norm
        for number in range(6):
            step(torch.randn(8, 4, generator=torch.Generator().manual_seed(number)).to(device))
        assert norm.momentum is None
        found.append([value.cpu() for value in (norm.running_mean, norm.running_var, norm.num_batches_tracked)])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-6)


@isolated
def test_a_version_that_is_not_known_trains_operation_by_operation_and_says_so() -> None:
    version = metadata.version

    def newer(name: str) -> str:
        return "0.9.1" if name == "torch_tpu" else version(name)

    with mock.patch.object(metadata, "version", newer):
        with pytest.warns(UserWarning, match=r"torch_tpu 0\.9\.1 is installed, and only 0\.2 is known"):
            xla_adapters.initialize()
        weight = nn.Parameter(torch.ones(3).to("tpu"))
        optimizer = torch.optim.SGD([weight], lr=0.5)

        @CompiledStep
        def step() -> torch.Tensor:
            loss = (weight * 2).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        assert [step().item() for _ in range(4)] == [6, 0, -6, -12]
        assert step.replays == 0
        assert get_runtime().counters.metrics().executions == 0
