"""What torch_xla computes on the host in a backward, or at a line that is not known, is reported with its line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import xla_adapters
from tests.device import DEVICE
from tests.isolation import isolated, outcome_of
from tests.support import Loop, unchanged
from xla_adapters.errors import GraphBreakError
from xla_adapters.runtime.torch_xla.operators import indexing, windows


class Distances(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.pdist(x)  # marked


def scattered(x: torch.Tensor) -> torch.Tensor:
    even = x * 2
    return even.masked_scatter(even > 0, x * 3).square()  # marked


def second_of_two(x: torch.Tensor) -> torch.Tensor:
    x = torch.cdist(x, x)
    x = F.pdist(x)  # marked
    return x.cumsum(0)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(gradients[0]).real.sum() * gradients[0]  # marked


def own_function(x: torch.Tensor) -> torch.Tensor:
    return Doubled.apply(x).sin()  # type: ignore[no-untyped-call]


def in_a_hook(x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    x.register_hook(lambda gradient: gradient * gradient.mode().values.sum())  # marked
    return x.exp()


def checkpointed(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(scattered_again, x * 2, use_reentrant=False)


def scattered_again(x: torch.Tensor) -> torch.Tensor:
    return x.masked_scatter(x > 0, x * 3).square()  # marked


def _marked(function: Any) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(index for index, line in enumerate(lines) if line.rstrip().endswith("# marked"))


CASES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Any]] = {
    "module": (Distances(), Distances),
    "scattered": (scattered, scattered),
    "second of two": (second_of_two, second_of_two),
    "own function": (own_function, Doubled),
    "hook": (in_a_hook, in_a_hook),
    "checkpointed": (checkpointed, scattered_again),
}


@pytest.fixture(autouse=True)
def _as_torch_xla_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators whose backward alone is on the host; with our kernels there is none."""
    for names in (windows.KERNELS.differentiable, indexing.KERNELS.below_autograd):
        for name in ("_pdist_forward", "masked_scatter_backward"):
            if name in names:
                monkeypatch.delitem(names, name)  # type: ignore[arg-type]


def _backward(loss: torch.Tensor, inputs: torch.Tensor, by: str) -> None:
    if by == "method":
        loss.backward()
    elif by == "function":
        torch.autograd.backward([loss])
    else:
        torch.autograd.grad(loss, inputs)


@isolated
@pytest.mark.parametrize("by", ["method", "function", "grad"])
def test_the_backward_names_the_forward(by: str) -> None:
    wrong = {}
    with xla_adapters.eager():
        loop = Loop()
        x = torch.randn(4, 6).to(DEVICE).requires_grad_()
        with xla_adapters.step():
            loop.body()
        for name, (forward, marked) in CASES.items():
            with unchanged(loop.model, loop.optimizer):
                try:
                    with xla_adapters.step():
                        loop.body()
                        _backward(forward(x * 1).sum(), x, by)
                    wrong[name] = "raises nothing"
                except xla_adapters.HostOperatorError as error:
                    line = _marked(marked)
                    if (error.filename, error.lineno) != (__file__, line) or f"{__file__}:{line}" not in str(error):
                        wrong[name] = f"line {line} expected: {error}"
                    if name in ("module", "scattered") and "in its backward, called from" not in str(error):
                        wrong[name] = f"does not say that it was the backward: {error}"
            assert x.grad is None
        with xla_adapters.count() as counters, xla_adapters.step():
            loop.body()
        assert (counters.compiles, counters.executions) == (0, 1)
    assert not wrong, wrong


class ScaledOnTheHost(nn.Module):
    """Its scale is in a list, so that it does not move with the module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scales = [nn.Parameter(torch.ones(4))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scales[0].to(x.device)  # marked
        return self.layer(x) * scale


@isolated
def test_a_gradient_that_is_copied_to_the_host_is_named() -> None:
    xla_adapters.initialize()
    model = ScaledOnTheHost().to(DEVICE)
    with pytest.raises(GraphBreakError, match="gradient of a tensor on the host") as caught, xla_adapters.step():
        model(torch.ones(2, 4).to(DEVICE)).sum().backward()
    assert f"{__file__}:{_marked(ScaledOnTheHost)}" in str(caught.value)
    assert "model.to(device)" in str(caught.value)


@isolated
@pytest.mark.parametrize("mode", ["error", "warn"])
def test_an_operator_of_values_that_are_there(mode: str) -> None:
    """It splits nothing, and is found when the step ends: by its name, where one line calls it."""

    def one(x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(x).real  # marked

    def two(x: torch.Tensor) -> torch.Tensor:
        return torch.special.i1(x) * torch.special.i1(x)  # both on one line

    def several(x: torch.Tensor) -> torch.Tensor:
        x.mode()
        return x.mode(0).values

    xla_adapters.initialize()
    x = torch.randn(4, 6).to(DEVICE)
    said = {}
    # Under "error" the second call of the last one is refused at its line, since the first one's result is pending.
    for function in (one, two) if mode == "error" else (one, two, several):
        if mode == "error":
            with pytest.raises(xla_adapters.HostOperatorError) as raised, xla_adapters.step():
                function(x)
            said[function] = str(raised.value)
        else:
            with pytest.warns(xla_adapters.GraphBreakWarning) as warned, xla_adapters.step(on_graph_break="warn"):
                function(x)
            said[function] = str(warned[0].message)
    assert f"where: {__file__}:{_marked(one)}: return torch.fft.rfft" in said[one]
    assert f"where: {__file__}:{two.__code__.co_firstlineno + 1}: " in said[two]
    assert several not in said or "where: no Python line" in said[several]


def _refused() -> None:
    xla_adapters.initialize()
    x = torch.randn(4, 6).to(DEVICE).requires_grad_()
    with pytest.raises(xla_adapters.HostOperatorError), xla_adapters.step():
        torch.fft.rfft(x * 1)
    with pytest.raises(xla_adapters.GraphBreakError), xla_adapters.step():
        torch.linalg.inv((x[:, :4] * 1) @ x[:, :4].mT)


def test_torch_xla_prints_nothing_of_its_own() -> None:
    outcome = outcome_of(_refused)
    assert outcome.ok, outcome.error
    assert "Execution Analysis" not in outcome.output
    told = outcome_of(_refused, env={"PT_XLA_DEBUG_FILE": "/dev/stderr"})
    assert "Execution Analysis" in told.output, "torch_xla says nothing any more: XLADevice.initialize need not care"
