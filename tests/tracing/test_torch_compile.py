"""What `torch.compile` compiled is a part of the step's graph."""

from __future__ import annotations

import functools
import warnings
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
from xla_adapters.utils.torch_modes import is_own_call_compiled, modules_compiled


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
@pytest.mark.parametrize("what", ["function", "submodule", "module", "in place", "forward"])
def test_a_step_that_may_be_replayed(what: str) -> None:
    xla_adapters.initialize()
    model: Any = _Net(what, "openxla").to(DEVICE)
    if what == "module":
        model = torch.compile(model, backend="openxla")
    elif what == "forward":
        model.forward = torch.compile(model.forward, backend="openxla")
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
    assert step.replays == 2, step.reasons


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


@isolated
def test_what_is_noticed_of_a_compiled_model_that_is_replayed() -> None:
    replays = []
    for compiles in (torch.compile, lambda module: module):
        # Torch's own container is compiled in another way than a class of the user's.
        layers = nn.Sequential(_Net("nothing", ""), nn.Dropout(0.5))
        model: Any = compiles(nn.Sequential(compiles(layers)).to("xla"))
        step, inputs, found = _update(model), torch.ones(4, 8), []
        for change in (lambda: None, model.eval, model.train, functools.partial(setattr, layers[1], "p", 0.25)):
            change()
            before = step.replays
            for _ in range(5):
                step(inputs)
            found.append(step.replays - before)
        replays.append(found)
    assert replays[0] == replays[1]
    assert min(replays[0]) > 0
    assert max(replays[0]) < 5


@isolated
def test_another_forward_of_a_compiled_model_is_called() -> None:
    model: Any = torch.compile(_Net("nothing", "").to("xla"))
    step, calls = _update(model), []
    for _ in range(5):
        step(torch.ones(4, 8))
    assert step.replays == 3, step.reasons

    def forward(values: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return model._orig_mod(values)  # type: ignore[no-any-return]

    model.forward = forward
    for _ in range(5):
        step(torch.ones(4, 8))
    assert (step.replays, len(calls)) == (3, 5), step.reasons


class _Loud(nn.Module):
    """Prints at each call."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        print("called")
        return inputs * 2


@isolated
@pytest.mark.parametrize("how", ["model", "forward", "submodule", "container"])
def test_python_that_must_run_is_found_in_what_is_compiled(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    loud = _Loud()
    if how == "forward":
        loud.forward = torch.compile(loud.forward)  # type: ignore[method-assign]
    parts: Any = torch.compile(loud) if how == "submodule" else loud
    model: Any = nn.Sequential(nn.Linear(8, 4), parts).to("xla")
    if how in ("model", "container"):
        model = torch.compile(nn.Sequential(model) if how == "container" else model)
    step = _update(model)
    for _ in range(5):
        step(torch.ones(4, 8))
    assert step.replays == 0
    assert any("print" in reason for reason in step.reasons), step.reasons
    assert capsys.readouterr().out.count("called") == 5


@isolated
def test_hooks_of_the_step_are_no_warning() -> None:
    model: Any = torch.compile(_Net("nothing", "openxla").to("xla"))
    step = _update(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            step(torch.ones(4, 8))
    assert step.replays == 2, step.reasons


@isolated
@pytest.mark.parametrize("kind", ["fullgraph", "dynamic", "reduce-overhead", "nested", "graph break", "in the step"])
def test_kinds_of_compiling_are_one_graph_and_leave_dynamo_as_it_was(kind: str) -> None:
    def options() -> tuple[Any, ...]:
        return dict(vars(torch._dynamo.config)), torch._dynamo.eval_frame._stance.stance, torch.is_grad_enabled()

    def loss_of(result: torch.Tensor) -> torch.Tensor:
        if kind == "graph break":
            torch._dynamo.graph_break()
        return result.square().mean()

    def losses(device: str, compiles: Callable[..., Any]) -> list[float]:
        model: Any = compiles(_Net("nothing", "").to(device))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        inner = compiles(loss_of) if kind != "in the step" else None

        def outer(result: torch.Tensor) -> torch.Tensor:
            return (inner or compiles(loss_of))(result) * 2  # type: ignore[no-any-return]

        loss = compiles(outer) if kind == "nested" else outer
        found = []
        for number in range(4):
            inputs = torch.full((4, 8), number / 4).to(device)
            with xla_adapters.step() if device == "xla" else torch.enable_grad():
                value = loss(model(inputs))
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(value.detach())
        return [value.item() for value in found]

    given: dict[str, dict[str, Any]] = {
        "fullgraph": {"fullgraph": True},
        "dynamic": {"dynamic": True},
        "reduce-overhead": {"mode": "reduce-overhead"},
    }
    xla_adapters.initialize()
    before = options()
    with xla_adapters.count() as counters:
        found = losses("xla", functools.partial(torch.compile, **given.get(kind, {})))
    assert (counters.compiles, counters.executions) == (1, 4)
    assert options() == before
    assert found == pytest.approx(losses("cpu", lambda function: function), abs=1e-6)
