"""Steps on TorchTPU: one program, one launch, and the numbers of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import xla_adapters
from tests.isolation import isolated
from xla_adapters import (
    CheckpointSaveError,
    CompiledStep,
    DeviceSyncError,
    DiscardedTensorError,
    GraphBreakError,
    TensorReadError,
    UnsupportedOptionError,
    get_runtime,
)
from xla_adapters.errors import PlaceholderError

Train = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _net(device: str, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(8, 16), nn.GELU(), nn.Dropout(dropout), nn.BatchNorm1d(16), nn.Linear(16, 4))
    return nn.Sequential(*layers).to(device)


def _batches(device: str, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        inputs, classes = torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)
        yield inputs.to(device), classes.to(device)


def _training(net: nn.Module, optimizer: torch.optim.Optimizer) -> Train:
    def train(inputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(net(inputs), classes)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return train


def _losses(device: str, wrap: Callable[[Train], Train], dropout: float = 0.0, steps: int = 20) -> list[float]:
    net = _net(device, dropout)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    # Also the momenta are others in each step.
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
    step = wrap(_training(net, optimizer))
    torch.manual_seed(3)
    losses = []
    for batch in _batches(device, steps):
        losses.append(step(*batch).item())
        schedule.step()
    assert float(next(iter(optimizer.state.values()))["step"]) == steps
    return losses


def _as_it_is(train: Train) -> Train:
    return train


@isolated
def test_a_schedule_takes_effect_in_traced_and_replayed_steps_of_one_program() -> None:
    expected = _losses("cpu", _as_it_is)
    xla_adapters.initialize()
    counters = get_runtime().counters
    for wrap in (xla_adapters.step, CompiledStep):
        before = counters.metrics()
        found = _losses("tpu", wrap)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        after = counters.metrics()
        assert after.executions - before.executions == 20
        assert after.compiles - before.compiles == 1


@isolated
def test_replays_draw_the_stream_of_eager_steps() -> None:
    xla_adapters.initialize()
    steps: list[CompiledStep[torch.Tensor]] = []

    def compiled(train: Train) -> Train:
        steps.append(CompiledStep(train))
        return steps[0]

    expected = _losses("tpu", _as_it_is, dropout=0.5, steps=7)
    torch.testing.assert_close(_losses("tpu", compiled, dropout=0.5, steps=7), expected, rtol=0, atol=1e-5)
    assert steps[0].replays == 5
    assert len({round(loss, 4) for loss in expected}) == 7


@isolated
def test_an_exception_puts_everything_back() -> None:
    xla_adapters.initialize()
    net = _net("tpu", 0.3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    train = _training(net, optimizer)
    (batch,) = _batches("tpu", 1)
    random = get_runtime().random

    def state() -> list[torch.Tensor]:
        moments = [value for state in optimizer.state.values() for value in state.values()]
        return [tensor.detach().cpu().clone() for tensor in (*net.state_dict().values(), *moments)]

    made: list[torch.Tensor] = []
    for first in (True, False):
        before, seed = state(), random.seed()
        with pytest.raises(ZeroDivisionError), xla_adapters.step():
            made.append(train(*batch))
            _ = 1 / 0
        assert random.seed() == seed
        assert len(optimizer.state) == (0 if first else 6)
        torch.testing.assert_close(state(), before, rtol=0, atol=0)
        assert all(parameter.grad is None for parameter in net.parameters())
        with pytest.raises(DiscardedTensorError):
            made[-1] + 1
        xla_adapters.step(train)(*batch)
        assert not torch.equal(state()[0], before[0])


@isolated
def test_reads_saves_and_syncs_in_a_step_are_errors_with_the_line() -> None:
    xla_adapters.initialize()
    net = _net("tpu")
    (batch,) = _batches("tpu", 1)
    reads: list[tuple[Callable[[torch.Tensor], object], type[GraphBreakError]]] = [
        (lambda loss: loss.item(), TensorReadError),
        (lambda loss: bool(loss > 0), TensorReadError),
        (lambda loss: f"{loss}", TensorReadError),
        (lambda loss: loss.cpu(), TensorReadError),
        (lambda loss: torch.save(loss, "/dev/null"), CheckpointSaveError),
        (lambda loss: torch.accelerator.synchronize(), DeviceSyncError),
        (lambda loss: loss.nonzero(), GraphBreakError),
    ]
    for read, expected in reads:
        with pytest.raises(expected) as caught, xla_adapters.step():
            read(functional.cross_entropy(net(batch[0]), batch[1]))
        assert type(caught.value) is expected
        assert caught.value.filename == __file__
        assert caught.value.lineno == read.__code__.co_firstlineno
        assert "on_graph_break" not in str(caught.value)
    assert functional.cross_entropy(net(batch[0]), batch[1]).item() > 0


def _micro_steps(net: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Train, Train]:
    def accumulate(inputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(net(inputs), classes) / 2
        loss.backward()
        return loss.detach()

    def update(inputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(net(inputs), classes) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return accumulate, update


@isolated
def test_micro_batches_accumulate_and_are_replayed() -> None:
    results = []
    for device in ("cpu", "tpu"):
        if device == "tpu":
            xla_adapters.initialize()
        net = _net(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        accumulate, update = _micro_steps(net, optimizer)
        steps = (accumulate, update) if device == "cpu" else (CompiledStep(accumulate), CompiledStep(update))
        results.append([steps[at % 2](*batch).item() for at, batch in enumerate(_batches(device, 10))])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-5)
    assert [step.replays for step in steps] == [3, 3]
    assert get_runtime().counters.compile_totals()[0] == 2


@isolated
def test_evaluation_steps() -> None:
    xla_adapters.initialize()
    net = _net("tpu").eval()

    @CompiledStep
    def evaluate(inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return net(inputs)

    for inputs, _ in _batches("tpu", 4):
        found = evaluate(inputs).cpu()
        torch.testing.assert_close(found, net(inputs).detach().cpu(), rtol=0, atol=1e-5)
    assert evaluate.replays == 2


@isolated
def test_a_change_of_python_state_is_traced_again() -> None:
    xla_adapters.initialize()
    net = _net("tpu")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = CompiledStep(_training(net, optimizer))
    for batch in _batches("tpu", 4):
        step(*batch)
    assert step.replays == 2
    for parameter in net[4].parameters():  # type: ignore[index]
        parameter.requires_grad_(False)
    before = net[4].weight.detach().cpu()  # type: ignore[index]
    for batch in _batches("tpu", 4):
        step(*batch)
    assert torch.equal(net[4].weight.detach().cpu(), before)  # type: ignore[index]
    assert step.replays == 4
    assert any("requires_grad" in reason for reason in step.reasons)


@isolated
def test_a_broken_promise_is_found_by_a_verification() -> None:
    xla_adapters.initialize()
    hidden = {"scale": 1.0}

    @xla_adapters.replay_safe
    def scale() -> float:
        return hidden["scale"]

    @CompiledStep
    def step(inputs: torch.Tensor) -> torch.Tensor:
        return inputs.sum() * scale()

    inputs = torch.ones(4, device="tpu")
    for _ in range(4):
        assert step(inputs).item() == 4
    step.verify()
    assert step(inputs).item() == 4
    assert (step.replays, step.program.verified) == (2, 1)
    hidden["scale"] = 2.0
    step.verify()
    with pytest.raises(xla_adapters.ReplayMismatchError, match="program"):
        step(inputs)


@isolated
def test_code_that_may_not_be_left_out_is_traced() -> None:
    xla_adapters.initialize()
    printed: list[int] = []

    @CompiledStep
    def step(inputs: torch.Tensor) -> torch.Tensor:
        printed.append(len(printed))
        return inputs.sum()

    for _ in range(4):
        step(torch.ones(4, device="tpu"))
    assert step.replays == 0
    assert len(printed) == 4
    assert get_runtime().counters.compile_totals()[0] == 1


@isolated
def test_a_step_inside_a_step_can_fail_alone() -> None:
    xla_adapters.initialize()
    net = _net("tpu")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    train = _training(net, optimizer)
    (batch,) = _batches("tpu", 1)
    before = net[0].weight.detach().cpu().clone()  # type: ignore[index]
    with xla_adapters.step():
        with pytest.raises(ZeroDivisionError), xla_adapters.step():
            train(*batch)
            _ = 1 / 0
        loss = functional.cross_entropy(net(batch[0]), batch[1])
    assert loss.item() > 0
    assert torch.equal(net[0].weight.detach().cpu(), before)  # type: ignore[index]


@isolated
def test_views_made_before_a_step_are_read_and_not_written() -> None:
    xla_adapters.initialize()
    data = torch.arange(12.0).reshape(3, 4).to("tpu")
    row = data[1]
    with xla_adapters.step():
        total = row.sum() + data.sum()
    assert total.item() == 22 + 66
    with pytest.raises(PlaceholderError, match=r"(?s)view.*test_step\.py:\d+"), xla_adapters.step():
        row.add_(1)
    assert data.sum().item() == 66


@isolated
def test_a_backward_of_a_forward_before_the_step_is_refused() -> None:
    xla_adapters.initialize()
    weight = torch.nn.Parameter(torch.ones(4, device="tpu"))
    loss = (weight * weight).exp().sum()
    with pytest.raises((PlaceholderError, GraphBreakError)), xla_adapters.step():
        loss.backward()
    assert weight.grad is None


@isolated
def test_what_is_not_there_is_refused_by_name() -> None:
    xla_adapters.initialize()
    with pytest.raises(UnsupportedOptionError, match="sharding"):
        xla_adapters.initialize(spmd=True)
    for option, value in (("on_graph_break", "warn"), ("xla_mode", "lazy")):
        with pytest.raises(UnsupportedOptionError, match=option), xla_adapters.step(**{option: value}):
            pass
    with pytest.raises(xla_adapters.ConfigError, match="fast_compile"):
        xla_adapters.initialize(fast_compile=True)
    with pytest.raises(xla_adapters.RuntimeOrderError, match="torch_tpu is in use"):
        xla_adapters.initialize(runtime="torch_xla")


@isolated
def test_a_further_program_can_be_an_error() -> None:
    xla_adapters.initialize()
    net = _net("tpu").eval()

    @xla_adapters.step(max_graphs=1)
    def evaluate(inputs: torch.Tensor) -> torch.Tensor:
        return net(inputs).detach()

    evaluate(torch.ones(2, 8, device="tpu"))
    evaluate(torch.zeros(2, 8, device="tpu"))
    with pytest.raises(xla_adapters.GraphLimitError, match="graph number 2"):
        evaluate(torch.ones(3, 8, device="tpu"))


@isolated
def test_optimizers_that_read_run_operation_by_operation() -> None:
    results = []
    for device in ("cpu", "tpu"):
        if device == "tpu":
            xla_adapters.initialize()
        net = _net(device)
        optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
        (batch,) = _batches(device, 1)
        train = _with_closure(net, optimizer)
        step = train if device == "cpu" else xla_adapters.step(train)
        results.append([step(*batch).item() for _ in range(3)])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-4)


def _with_closure(net: nn.Module, optimizer: torch.optim.Optimizer) -> Train:
    def train(inputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(inputs), classes)
            loss.backward()
            return loss

        return optimizer.step(closure).detach()  # type: ignore[arg-type]

    return train


@isolated
def test_a_parameter_that_is_frozen_while_it_has_a_gradient() -> None:
    def program(device: str, wrap: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(device)
        optimizer = torch.optim.AdamW(model.parameters())

        def train(inputs: torch.Tensor) -> torch.Tensor:
            loss = model(inputs).square().mean()
            # As Lightning does, which looks at the gradients of all parameters.
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad = None
            loss.backward()
            optimizer.step()
            return loss.detach()

        step, losses = wrap(train), []
        for at in range(8):
            if at == 4:
                model[0].weight.requires_grad_(False)
            losses.append(step(torch.full((3, 4), 0.5 + at).to(device)).cpu())
        return [*losses, *(parameter.detach().cpu() for parameter in model.parameters())]

    expected = program("cpu", lambda function: function)
    xla_adapters.initialize()
    for wrap in (xla_adapters.step, CompiledStep):
        torch.testing.assert_close(program("tpu", wrap), expected, rtol=0, atol=1e-5)
