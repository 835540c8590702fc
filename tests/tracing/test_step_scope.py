"""The step scope: one graph, executed once, whatever happens inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import xla_adapters
from tests.device import DEVICE

pytestmark = pytest.mark.isolated


class Loop:
    """A small training loop with every kind of state: buffers, dropout, two moments."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.batch = torch.randn(3, 4).to(DEVICE)

    def body(self) -> torch.Tensor:
        loss = self.model(self.batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def state(self) -> dict[str, torch.Tensor]:
        tensors = {name: value.cpu() for name, value in self.model.state_dict().items()}
        for index, values in enumerate(self.optimizer.state.values()):
            tensors |= {f"{index}.{name}": value.cpu() for name, value in values.items()}
        return tensors


def test_first_step_compiles_and_all_steps_execute_once() -> None:
    with xla_adapters.eager():
        loop = Loop()
        with xla_adapters.count() as first:
            with xla_adapters.step():
                loop.body()
        with xla_adapters.count() as later:
            for _ in range(3):
                with xla_adapters.step():
                    loop.body()
    assert (first.compiles, first.executions, first.eager_ops, first.transfers_to_host) == (1, 1, 0, 0)
    assert (later.compiles, later.executions, later.eager_ops, later.transfers_to_host) == (0, 3, 0, 0)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_exception_leaves_everything_as_before(error: type[BaseException]) -> None:
    with xla_adapters.eager():
        loop = Loop()
        with xla_adapters.step():
            loop.body()
        before = loop.state()
        with xla_adapters.count() as counters:
            with pytest.raises(error), xla_adapters.step():
                loop.body()
                raise error
        after = loop.state()
        assert counters.executions == counters.compiles == counters.eager_ops == 0
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert xla_adapters.get_runtime().tracing.eager()
        with xla_adapters.count() as next_step, xla_adapters.step():
            loop.body()
        assert (next_step.compiles, next_step.executions) == (0, 1)


class _Projected(torch.autograd.Function):
    """Uses views of its inputs in the forward, where gradients are off."""

    @staticmethod
    def forward(context: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(hidden, weight)
        return hidden[0:2] @ weight.t()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weight = context.saved_tensors
        padded = torch.cat([gradient, torch.zeros_like(gradient[:1])])
        return padded @ weight, padded.t() @ hidden


def test_views_that_an_autograd_function_makes_do_not_outlive_it() -> None:
    loop = Loop()
    weight = nn.Parameter(torch.randn(5, 2).to(DEVICE))
    runtime = xla_adapters.get_runtime()
    runtime.tracing.flush()
    with xla_adapters.step():
        hidden = loop.model(loop.batch)
        _Projected.apply(hidden, weight).square().mean().backward()
        del hidden
        with torch._C.DisableTorchFunction():
            kept = [tuple(tensor.shape) for tensor in runtime.tracing.live_tensors() if tensor.grad_fn is not None]
    assert kept == []
