"""Steps on TorchTPU: one program, one launch, and the numbers of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import xla_adapters
from tests.torch_tpu.nets import Train, batches, net_on, training
from xla_adapters import (
    CheckpointSaveError,
    CompiledStep,
    DeviceSyncError,
    GraphBreakError,
    TensorReadError,
    UnsupportedOptionError,
    get_runtime,
)
from xla_adapters.errors import PlaceholderError

pytestmark = pytest.mark.isolated


def _net() -> Any:
    return net_on("tpu", nn.Dropout(0.0), nn.BatchNorm1d(16))


def _losses(device: str, wrap: Callable[[Train], Train], dropout: float = 0.0, steps: int = 20) -> list[float]:
    net = net_on(device, nn.Dropout(dropout), nn.BatchNorm1d(16))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    # Also the momenta are others in each step.
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
    step = wrap(training(net, optimizer))
    torch.manual_seed(3)
    losses = []
    for batch in batches(device, steps):
        losses.append(step(*batch).item())
        schedule.step()
    assert float(next(iter(optimizer.state.values()))["step"]) == steps
    return losses


def _as_it_is(train: Train) -> Train:
    return train


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


def test_reads_saves_and_syncs_in_a_step_are_errors_with_the_line() -> None:
    xla_adapters.initialize()
    net = _net()
    (batch,) = batches("tpu", 1)
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


def test_evaluation_steps() -> None:
    xla_adapters.initialize()
    net = _net().eval()

    @CompiledStep
    def evaluate(inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return net(inputs)

    for inputs, _ in batches("tpu", 4):
        found = evaluate(inputs).cpu()
        torch.testing.assert_close(found, net(inputs).detach().cpu(), rtol=0, atol=1e-5)
    assert evaluate.replays == 2


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


def test_a_step_inside_a_step_can_fail_alone() -> None:
    xla_adapters.initialize()
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    train = training(net, optimizer)
    (batch,) = batches("tpu", 1)
    before = net[0].weight.detach().cpu().clone()
    with xla_adapters.step():
        with pytest.raises(ZeroDivisionError), xla_adapters.step():
            train(*batch)
            _ = 1 / 0
        loss = functional.cross_entropy(net(batch[0]), batch[1])
    assert loss.item() > 0
    assert torch.equal(net[0].weight.detach().cpu(), before)


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


def test_a_backward_of_a_forward_before_the_step_is_refused() -> None:
    xla_adapters.initialize()
    weight = torch.nn.Parameter(torch.ones(4, device="tpu"))
    loss = (weight * weight).exp().sum()
    with pytest.raises((PlaceholderError, GraphBreakError)), xla_adapters.step():
        loss.backward()
    assert weight.grad is None


def test_what_is_not_there_is_refused_by_name() -> None:
    xla_adapters.initialize()
    # A loop for several processes runs in one.
    xla_adapters.initialize(spmd=True)
    with pytest.raises(UnsupportedOptionError, match="xla-adapters launch"):
        _ = xla_adapters.get_runtime().spmd
    for option, value in (("on_graph_break", "warn"), ("xla_mode", "lazy")):
        with pytest.raises(UnsupportedOptionError, match=option), xla_adapters.step(**{option: value}):
            pass
    with pytest.raises(xla_adapters.ConfigError, match="fast_compile"):
        xla_adapters.initialize(fast_compile=True)
    with pytest.raises(xla_adapters.RuntimeOrderError, match="torch_tpu is in use"):
        xla_adapters.initialize(runtime="torch_xla")


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


# ---- accumulation ------------------------------------------------------------------------------------

_UPDATES = 8


def _trained(device: str, count: int) -> tuple[list[float], int]:
    """The losses, and how many calls of the micro-batches' step were replayed."""
    net = net_on(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)

    def micro(inputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(net(inputs), classes) / count
        loss.backward()
        return loss.detach()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    step, end = (CompiledStep(micro), CompiledStep(update)) if device == "tpu" else (micro, update)
    losses = []
    for number, batch in enumerate(batches(device, _UPDATES * count), 1):
        losses.append(float(step(*batch)))
        if number % count == 0:
            end()
    return losses, step.replays if isinstance(step, CompiledStep) else 0


@pytest.mark.parametrize("count", [2, 3])
def test_micro_batches_are_replayed_with_and_without_gradients_before_them(count: int) -> None:
    xla_adapters.initialize()
    losses, replays = _trained("tpu", count)
    assert losses == pytest.approx(_trained("cpu", count)[0], abs=1e-5)
    # All but the first two or three of each kind, and what verifies them.
    assert replays >= _UPDATES * count / 2


def test_gradients_that_do_not_depend_on_the_weights() -> None:
    """The program computes them from the batch alone; the trace still needs the weights' shapes."""
    xla_adapters.initialize()
    net, plain = nn.Linear(4, 4).to("tpu"), nn.Linear(4, 4)
    batch = torch.arange(8.0).view(2, 4)
    for _ in range(3):
        with xla_adapters.step():
            net(batch.to("tpu")).sum().backward()
        plain(batch).sum().backward()
    assert net.weight.grad is not None
    assert torch.equal(net.weight.grad.cpu(), plain.weight.grad)  # type: ignore[arg-type]
    assert net.bias.grad.cpu().tolist() == plain.bias.grad.tolist()  # type: ignore[union-attr]
    # The values of the weights are still there.
    assert net.weight.detach().cpu().isfinite().all()
