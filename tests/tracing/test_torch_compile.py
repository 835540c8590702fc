"""What `torch.compile` compiled is a part of the step's graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

import xla_adapters
from tests.device import DEVICE
from tests.isolation import isolated
from xla_adapters.replay.compiled_step import CompiledStep
from xla_adapters.utils.compiling import is_own_call_compiled, modules_compiled


class _Net(nn.Module):
    """A function, a submodule or all of it is compiled."""

    def __init__(self, what: str, backend: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.act: Callable[..., torch.Tensor] = _activation
        if what == "function":
            self.act = torch.compile(_activation, backend=backend)
        elif what == "submodule":
            self.second = torch.compile(self.second, backend=backend)  # type: ignore[assignment]
        elif what == "in place":
            self.compile(backend=backend)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.act(self.first(inputs)))
        return result


def _activation(values: torch.Tensor) -> torch.Tensor:
    return torch.relu(values) * 2


def _losses(device: str, what: str, backend: str = "openxla", scope: Any = None) -> list[float]:
    model: Any = _Net(what, backend).to(device)
    if what == "module":
        model = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    losses = []
    for number in range(3):
        inputs = torch.full((4, 8), number / 4).to(device)
        with scope():
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


@isolated
@pytest.mark.parametrize("backend", ["openxla", "inductor"])
@pytest.mark.parametrize("what", ["function", "submodule", "module", "in place"])
def test_one_graph_per_step(what: str, backend: str) -> None:
    xla_adapters.initialize()
    with xla_adapters.count() as counters:
        found = _losses(DEVICE, what, backend, xla_adapters.step)
    assert (counters.compiles, counters.executions) == (1, 3)
    assert found == pytest.approx(_losses("cpu", "nothing", scope=torch.enable_grad), abs=1e-6)


@isolated
@pytest.mark.parametrize("fails", [False, True])
def test_outside_of_steps_it_is_compiled_as_before(fails: bool) -> None:
    xla_adapters.initialize()
    calls: list[int] = []

    def backend(module: Any, inputs: Any) -> Any:
        calls.append(len(inputs))
        return module.forward

    function = torch.compile(_activation, backend=backend)
    values = torch.ones(4, device=DEVICE)
    try:
        with xla_adapters.step():
            function(values)
            if fails:
                raise ValueError("the test's own")
    except ValueError:
        assert fails
    assert calls == []
    assert function(torch.ones(4)).tolist() == [2, 2, 2, 2]
    assert len(calls) == 1


@isolated
@pytest.mark.parametrize("what", ["function", "submodule", "module", "in place"])
def test_a_step_that_may_be_replayed(what: str) -> None:
    xla_adapters.initialize()
    model: Any = _Net(what, "openxla").to(DEVICE)
    if what == "module":
        model = torch.compile(model, backend="openxla")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(inputs: torch.Tensor) -> torch.Tensor:
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = CompiledStep(train)
    losses = [float(step(torch.ones(4, 8))) for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert step.program.graphs == 1
    # Replayed, or traced with the reason.
    assert step.replays or step.reasons


class _Shortcut(nn.Module):
    """Looks at its mask, as transformers' models do, unless it is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        mask = inputs > 0
        if not torch.compiler.is_compiling() and mask.all():
            return self.layer(inputs)  # type: ignore[no-any-return]
        return self.layer(inputs * mask)  # type: ignore[no-any-return]


class _Witness(torch.optim.SGD):
    """Notes how its update is run."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.defaults["compiling"] = torch.compiler.is_compiling()
        return result


@isolated
@pytest.mark.parametrize("with_closure", [False, True])
def test_models_take_the_path_that_reads_no_values(with_closure: bool) -> None:
    xla_adapters.initialize()
    torch.manual_seed(0)
    model = _Shortcut().to(DEVICE)
    optimizer = _Witness(model.parameters(), 0.1)

    def train(inputs: torch.Tensor) -> torch.Tensor:
        def forward_and_backward() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            return loss

        if with_closure:
            return optimizer.step(forward_and_backward).detach()  # type: ignore[no-any-return]
        loss = forward_and_backward()
        optimizer.step()
        return loss.detach()

    step = CompiledStep(train)
    with xla_adapters.count() as counters:
        losses = [step(torch.ones(4, 8)) for _ in range(3)]
    assert (counters.compiles, counters.executions) == (1, 3)
    assert [loss.item() for loss in losses] == sorted((loss.item() for loss in losses), reverse=True)
    assert optimizer.defaults["compiling"] is False
    assert not torch.compiler.is_compiling()
    with pytest.raises(ValueError, match="own"), xla_adapters.step():
        raise ValueError("the test's own")
    assert not torch.compiler.is_compiling()


def _update(model: nn.Module) -> CompiledStep[Any]:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def update(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return CompiledStep(update)


@pytest.mark.parametrize("how", ["compile()", "modules_compiled"])
@isolated
def test_a_step_with_a_compiled_model_is_replayed(how: str) -> None:
    losses = []
    for compiled in (False, True):
        model = _Net("nothing", "openxla").to(DEVICE)
        with ExitStack() as stack:
            if compiled and how == "compile()":
                model.compile(backend="openxla")
            elif compiled:
                stack.enter_context(modules_compiled([model], "openxla"))
            step = _update(model)
            losses.append([step(torch.full((4, 8), number / 4)).item() for number in range(6)])
            assert step.replays == 4, step.reasons
    assert losses[0] == losses[1]


@isolated
def test_another_function_in_its_place_is_called() -> None:
    model = _Net("nothing", "openxla").to(DEVICE)
    model.compile(backend="openxla")
    step, calls, before = _update(model), [], model._compiled_call_impl

    @functools.wraps(before)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return before(*args, **kwargs)

    assert is_own_call_compiled(model, before)
    assert not is_own_call_compiled(_Net("nothing", "openxla"), before)
    assert not is_own_call_compiled(model, counted)
    for _ in range(5):
        step(torch.ones(4, 8))
    assert step.replays == 3
    model._compiled_call_impl = counted  # type: ignore[assignment]
    for _ in range(5):
        step(torch.ones(4, 8))
    assert (step.replays, len(calls)) == (3, 5), step.reasons
