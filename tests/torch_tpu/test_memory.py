"""What programs do with memory between steps on TorchTPU: copies, replaced data, running statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import xla_adapters
from tests.torch_tpu import stand_in
from xla_adapters import CompiledStep, GraphBreakError, UnsupportedOptionError, get_runtime
from xla_adapters.errors import DeviceOutOfMemoryError, PlaceholderError
from xla_adapters.tracing.placeholders.program import executables_of_the_process

pytestmark = pytest.mark.isolated

Step = Callable[[torch.Tensor], torch.Tensor]


def _model(device: str) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4)).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def train(inputs: torch.Tensor) -> torch.Tensor:
        loss = (model(inputs) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return train


def _inputs(at: int, device: str) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(at)).to(device)


def _both(program: Callable[[str, Callable[[Step], Step]], list[torch.Tensor]]) -> CompiledStep[torch.Tensor]:
    """Compares what a program returns on the CPU, traced, and replayed."""
    expected = program("cpu", lambda function: function)
    xla_adapters.initialize()
    steps: list[CompiledStep[torch.Tensor]] = []

    def compiled(function: Step) -> Step:
        steps.append(CompiledStep(function))
        return steps[-1]

    for wrap in (xla_adapters.step, compiled):
        torch.testing.assert_close(program("tpu", wrap), expected, rtol=0, atol=1e-5)
    return steps[0]


def _values(*modules: nn.Module) -> list[torch.Tensor]:
    return [value.detach().cpu().clone() for module in modules for value in module.state_dict().values()]


def test_copies_of_what_a_step_changes_keep_their_value() -> None:
    def program(device: str, wrap: Callable[[Step], Step]) -> list[torch.Tensor]:
        model, optimizer = _model(device)
        step, copies = wrap(_step(model, optimizer)), [copy.deepcopy(model)]
        for at in range(8):
            step(_inputs(at, device))
            copies[0].load_state_dict(model.state_dict())
            if at % 3 == 0:
                copies.append(copy.deepcopy(model))
        kept = {key: value.clone() for key, value in model.state_dict().items()}
        step(_inputs(8, device))
        return [*_values(model, *copies), *(value.cpu() for value in kept.values())]

    assert _both(program).replays == 7


@pytest.mark.parametrize("kind", ["clone", "copy_", "_foreach_copy_", "to", "deepcopy", "new_tensor", "transposed"])
@pytest.mark.filterwarnings("ignore:To copy construct")
def test_each_copy_has_a_buffer_of_its_own(kind: str) -> None:
    xla_adapters.initialize()
    source = torch.arange(6.0).to("tpu")
    target = torch.zeros(6).to("tpu")
    if kind == "_foreach_copy_":
        torch._foreach_copy_([target], [source])
    made: dict[str, Callable[[], torch.Tensor]] = {
        "clone": source.clone,
        "copy_": lambda: target.copy_(source),
        "_foreach_copy_": lambda: target,
        "to": lambda: source.to("tpu", copy=True),
        "deepcopy": lambda: copy.deepcopy(source),
        "new_tensor": lambda: source.new_tensor(source),
        "transposed": lambda: source.view(2, 3).t().clone().t().reshape(6),
    }
    found = made[kind]()
    with xla_adapters.step():
        source.add_(1)
    assert found.tolist() == [0, 1, 2, 3, 4, 5]
    assert source.tolist() == [1, 2, 3, 4, 5, 6]


def test_an_average_of_the_weights_in_the_step() -> None:
    def program(device: str, wrap: Callable[[Step], Step]) -> list[torch.Tensor]:
        model, optimizer = _model(device)
        average = copy.deepcopy(model).requires_grad_(False)
        train = _step(model, optimizer)

        def both(inputs: torch.Tensor) -> torch.Tensor:
            loss = train(inputs)
            with torch.no_grad():
                for mine, other in zip(average.parameters(), model.parameters(), strict=True):
                    mine.lerp_(other, 0.1)
            return loss

        step = wrap(both)
        for at in range(8):
            step(_inputs(at, device))
        return _values(model, average)

    assert _both(program).replays == 6


_OVERWRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "copy_": lambda mine, other: mine.copy_(other),
    "copy_ through .data": lambda mine, other: mine.data.copy_(other.data),
    "copy_ through detach": lambda mine, other: mine.detach().copy_(other),
    "data": lambda mine, other: setattr(mine, "data", other.data.clone()),
    "index": lambda mine, other: mine.__setitem__(slice(None), other),
    "foreach": lambda mine, other: torch._foreach_copy_([mine], [other]),
    "zero_": lambda mine, other: mine.zero_(),
}


@pytest.mark.parametrize("how", _OVERWRITES)
def test_what_a_step_overwrites_and_never_reads_is_written(how: str) -> None:
    """As the network that an agent's targets come from."""

    def program(device: str, wrap: Callable[[Step], Step]) -> list[torch.Tensor]:
        model, optimizer = _model(device)
        target = copy.deepcopy(model).requires_grad_(False)
        train = _step(model, optimizer)

        def both(inputs: torch.Tensor) -> torch.Tensor:
            loss = train(inputs)
            with torch.no_grad():
                for mine, other in zip(target.parameters(), model.parameters(), strict=True):
                    _OVERWRITES[how](mine, other)
            return loss

        step = wrap(both)
        for at in range(4):
            step(_inputs(at, device))
        return _values(model, target)

    _both(program)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_are_those_of_the_cpu(momentum: float | None) -> None:
    def program(device: str, wrap: Callable[[Step], Step]) -> list[torch.Tensor]:
        model, optimizer = _model(device)
        model[1].momentum = momentum
        step, found = wrap(_step(model, optimizer)), []
        for at in range(8):
            if at == 4:
                model[1].momentum = 0.5
            step(_inputs(at, device))
            found.append(model.eval()(_inputs(0, device)).detach().cpu())
            model.train()
        with torch.no_grad():
            model(_inputs(9, device))
        return [*found, *_values(model)]

    assert _both(program).replays > 0


def test_data_that_lies_otherwise_is_traced_again() -> None:
    def program(device: str, wrap: Callable[[Step], Step]) -> list[torch.Tensor]:
        model, optimizer = _model(device)
        step, found = wrap(_step(model, optimizer)), []
        for at in range(12):
            if at == 5:
                model[0].weight.data = model[0].weight.data.t()
            if at == 8:
                model[3].weight.data = model[0].weight.data
            found.append(step(_inputs(at, device)).cpu())
        return [*found, *_values(model)]

    step = _both(program)
    assert any("lies otherwise" in reason for reason in step.reasons)
    assert any("that another one has, too" in reason for reason in step.reasons)


def test_data_that_is_a_view_later_is_refused_in_replays_too() -> None:
    xla_adapters.initialize()
    model, optimizer = _model("tpu")
    step = CompiledStep(_step(model, optimizer))
    for at in range(4):
        step(_inputs(at, "tpu"))
    assert step.replays == 2
    whole = torch.zeros(2, 4, 4).to("tpu")
    model[0].weight.data = whole[1]
    with pytest.raises(PlaceholderError, match="view"):
        step(_inputs(4, "tpu"))
    assert whole.sum().item() == 0


def test_a_batch_with_the_memory_of_a_parameter_is_traced() -> None:
    def program(device: str, wrap: Callable[[Step], Step]) -> list[torch.Tensor]:
        model, optimizer = _model(device)
        step = wrap(_step(model, optimizer))
        inputs = [_inputs(at, device)[:4] for at in range(5)]
        return [step(batch).cpu() for batch in inputs] + [step(model[0].weight.data).cpu() for _ in range(3)]

    assert _both(program).replays == 3


def test_a_fused_optimizer_is_refused_by_name() -> None:
    xla_adapters.initialize()
    model, _ = _model("tpu")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with pytest.raises(UnsupportedOptionError, match=r"AdamW\(fused=True\)"):
        xla_adapters.step(_step(model, optimizer))(_inputs(0, "tpu"))


def test_an_index_that_is_read_is_an_error_with_the_line() -> None:
    xla_adapters.initialize()
    table, index = torch.zeros(4, 4).to("tpu"), torch.tensor(1).to("tpu")
    with pytest.raises(GraphBreakError) as caught, xla_adapters.step():
        table[index] = 2.0
    assert caught.value.filename == __file__
    assert get_runtime().counters.metrics().executions == 0
    assert table.sum().item() == 0


def test_copies_from_before_the_start_keep_their_values() -> None:
    """torch_tpu lets them share a buffer, which a step that is given it would delete."""
    net = nn.Linear(4, 4).to("tpu")
    best, average = copy.deepcopy(net), net.weight.detach().clone()
    alias, before = net.weight.detach(), net.weight.detach().cpu()
    xla_adapters.initialize()
    assert alias.data_ptr() == net.weight.data_ptr()
    for _ in range(2):
        with xla_adapters.step(), torch.no_grad():
            net.weight.add_(1.0)
    with xla_adapters.step(), torch.no_grad():
        net.weight.mul_(2.0)
        best.weight.sub_(1.0)
    assert torch.equal(average.cpu(), before)
    assert torch.equal(best.weight.detach().cpu(), before - 1)
    assert torch.equal(net.weight.detach().cpu(), (before + 2) * 2)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_program_that_does_not_fit_leaves_everything_as_before(compiled: bool) -> None:
    def program(number: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, optimizer = _model("tpu")
        model.append(nn.Dropout(0.5))
        step: Step = (CompiledStep if compiled else xla_adapters.step)(_step(model, optimizer))
        for at in range(4):
            inputs = _inputs(at, "cpu")[: 8 if at < 3 else 4].to("tpu")
            if at == number:
                before = _values(model)
                torch.accelerator.synchronize()
                stand_in.fail_launch()
                with pytest.raises(DeviceOutOfMemoryError, match="parameters are as before"):
                    step(inputs)
                assert all(map(torch.equal, before, _values(model)))
            step(inputs)
        return _values(model)

    xla_adapters.initialize()
    # The first launch of each program: that of the step, and that of a batch of another size.
    expected = program(9)
    executables_of_the_process.cache_clear()
    assert all(map(torch.equal, expected, program(0)))
    executables_of_the_process.cache_clear()
    assert all(map(torch.equal, expected, program(3)))
