"""Weights that are copied between steps: the source of a copy keeps its value, and the copy too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import xla_adapters
from tests.support import update
from xla_adapters import CompiledStep, XLAConfig
from xla_adapters.tracing.graph_history import GraphHistory
from xla_adapters.tracing.step_scope import StepScope

pytestmark = pytest.mark.isolated

Weights = list[torch.Tensor]


def _swap(weights: Weights, average: Weights) -> None:
    for weight, mean in zip(weights, average, strict=True):
        weight.data, mean.data = mean.data, weight.data


def _set_clones(weights: Weights, average: Weights) -> None:
    for weight, mean in zip(weights, average, strict=True):
        weight.data = mean.clone()


def _set(weights: Weights, average: Weights) -> None:
    for weight, mean in zip(weights, average, strict=True):
        weight.data = mean


WAYS: dict[str, Callable[[Weights, Weights], object]] = {
    "copy_": lambda weights, average: [weight.copy_(mean) for weight, mean in zip(weights, average, strict=True)],
    "data.copy_": lambda weights, average: [
        weight.data.copy_(mean) for weight, mean in zip(weights, average, strict=True)
    ],
    "foreach": torch._foreach_copy_,
    "data": _set,
    "data of clones": _set_clones,
    "swap": _swap,
    "the other way": lambda weights, average: torch._foreach_copy_(average, weights),
}
OPTIMIZERS = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}


def _train(device: str, replay: Any, way: str, optimizer: str, *, sync: bool = False, eager: bool = True) -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(device)
    weights: Weights = list(model.parameters())
    updates = OPTIMIZERS[optimizer](weights, lr=0.05)

    def step(inputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return update(nn.functional.cross_entropy(model(inputs), classes), updates)

    call: Any = step if device == "cpu" else CompiledStep(step, config=XLAConfig(step_replay=replay))
    with xla_adapters.eager(eager):
        average = [weight.detach().clone() for weight in weights]
        frozen = copy.deepcopy(model)
        found = []
        for number in range(9):
            generator = torch.Generator().manual_seed(number)
            inputs = torch.randn(6, 8, generator=generator)
            found.append(float(call(inputs, torch.randint(0, 4, (6,), generator=generator))))
            with torch.no_grad():
                for mean, weight in zip(average, weights, strict=True):
                    mean.mul_(0.9).add_(weight.detach(), alpha=0.1)
                if number in (2, 6):
                    WAYS[way](weights, average)
                    if sync:
                        xla_adapters.get_runtime().tracing.finish_step()
        kept = [*average, *weights, *frozen.parameters()]
        found += [value for tensor in kept for value in tensor.detach().cpu().flatten().tolist()]
    return found, getattr(call, "replays", 0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_both_sides_of_a_copy_keep_their_value(way: str, optimizer: str) -> None:
    xla_adapters.initialize()
    expected, _ = _train("cpu", None, way, optimizer)
    for replay in (False, "auto"):
        found, replays = _train("xla", replay, way, optimizer)
        assert found == pytest.approx(expected, abs=2e-5), replay
        assert (replays > 0) == (replay == "auto")


def test_a_sync_in_between_hides_no_copy() -> None:
    xla_adapters.initialize()
    expected, _ = _train("cpu", None, "the other way", "SGD")
    for eager in (True, False):
        for replay in (False, "auto"):
            found, _ = _train("xla", replay, "the other way", "SGD", sync=True, eager=eager)
            assert found == pytest.approx(expected, abs=2e-5), (eager, replay)


@pytest.mark.parametrize("replay", [False, "auto"])
def test_nothing_is_executed_where_nothing_is_shared(replay: Any) -> None:
    """An average that is computed, and a loss that is copied, cost no execution of a step."""
    xla_adapters.initialize()
    model = nn.Linear(4, 3).to("xla")
    updates = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(inputs: torch.Tensor) -> torch.Tensor:
        return update(model(inputs).square().mean(), updates)

    call = CompiledStep(step, config=XLAConfig(step_replay=replay))
    with xla_adapters.eager(), torch.no_grad():
        average = [parameter * 1 for parameter in model.parameters()]
        losses = []
        for number in range(8):
            inputs = xla_adapters.get_runtime().transfers.to_device(torch.ones(2, 4))
            with torch.enable_grad(), xla_adapters.count() as counters:
                loss = call(inputs)
            if number > 2:
                assert (counters.compiles, counters.executions) == (0, 1)
            losses.append(loss.clone())
            for mean, parameter in zip(average, model.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)
    assert len({round(float(loss), 6) for loss in losses}) == 8


def test_one_tensor_given_twice_is_replayed_and_told_from_two() -> None:
    xla_adapters.initialize()

    def train(device: str, replay: Any) -> tuple[list[float], int]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4).to(device)
        updates = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return update((model(batch["inputs"]) - batch["labels"]).square().mean(), updates)

        call: Any = step if device == "cpu" else CompiledStep(step, config=XLAConfig(step_replay=replay))
        losses = []
        for number in range(25):
            first, second = (torch.full((2, 4), value + number / 9).to(device) for value in (1.0, -2.0))
            with xla_adapters.eager():
                labels = (first, second, first.clone(), first.detach(), first.view(2, 4))[number // 5]
            losses.append(float(call({"inputs": first, "labels": labels})))
        return losses, getattr(call, "replays", 0)

    expected, replayed = train("cpu", None), train("xla", "auto")
    assert replayed[0] == pytest.approx(expected[0], abs=1e-5)
    assert replayed[1] >= 19


@pytest.mark.parametrize("eager", [True, False])
def test_the_upload_of_an_index_hides_no_copy(eager: bool) -> None:
    """An index on the host is uploaded without the operation that other uploads count as."""
    xla_adapters.initialize(eager=eager)
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logits, index = torch.randn(5, 7).to("xla"), torch.arange(3)

    @CompiledStep
    def step(inputs: torch.Tensor) -> torch.Tensor:
        return update(model(inputs).square().mean(), optimizer)

    def train(steps: int) -> None:
        for _ in range(steps):
            step(torch.randn(2, 4))

    train(5)
    _ = logits[index, index]
    copied = model.weight.detach().to("xla", copy=True)
    expected = model.weight.detach().cpu()
    train(2)
    assert step.replays >= 4
    assert torch.equal(copied.cpu(), expected)


def test_what_was_traced_lazily_is_executed_before_a_replay() -> None:
    """A replay overwrites the weights that a pending value reads."""
    xla_adapters.initialize()
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @CompiledStep
    def step(inputs: torch.Tensor) -> None:
        update(model(inputs).square().mean(), optimizer)

    for _ in range(5):
        step(torch.randn(2, 4))
    expected = 3 * model.weight.detach().cpu()
    with xla_adapters.eager(False):
        scaled = 3 * model.weight.detach()
    step(torch.randn(2, 4))
    assert step.replays >= 3
    assert torch.equal(scaled.cpu(), expected)


def _graphs_beside_a_copy(make: Callable[[nn.Module], object], classes: int) -> int:
    """How many graphs a step has whose model was copied before its first call."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, classes)).to("xla")
    copied = make(model)
    updates = torch.optim.SGD(model.parameters(), lr=0.1)
    history = GraphHistory()
    for _ in range(4):
        inputs = torch.randn(6, 8).to("xla")
        scope = StepScope(history=history)
        with scope:
            update(model(inputs).square().mean(), updates)
    del copied
    return history.graphs


def test_a_copy_before_the_first_step_costs_no_graph() -> None:
    xla_adapters.initialize()
    ways: list[Callable[[nn.Module], object]] = [
        copy.deepcopy,
        torch.optim.swa_utils.AveragedModel,
        lambda model: {name: value.clone() for name, value in model.state_dict().items()},
    ]
    # After the first of them steps have been executed in this process: then the copies are found where they end.
    # The copies of the first one are found when the step begins, those of the others when it ends.
    for classes, make in enumerate(ways, start=2):
        assert _graphs_beside_a_copy(make, classes) == 1


def _trained_beside_copies(make: Callable[[nn.Module], Any] | None) -> tuple[Weights, int, list[int]]:
    """The weights after ten steps, how many graphs the step has, and the compiles of the calls after a copy."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)).to("xla")
    updates = torch.optim.AdamW(model.parameters(), lr=0.1)
    history, compiles, kept = GraphHistory(), [], None
    inputs = torch.randn(4, 8)
    for number in range(10):
        before = None
        if number in (2, 4, 6, 8) and make is not None:
            before = [weight.cpu() for weight in model.parameters()]
            kept = make(model)
        with xla_adapters.count() as counted, StepScope(history=history):
            update(model(inputs.to("xla")).square().mean(), updates)
        if before is not None:
            compiles.append(counted.compiles)
            assert all(torch.equal(copied.cpu(), weight) for copied, weight in zip(kept, before, strict=True))
    return [weight.cpu() for weight in model.parameters()], history.graphs, compiles


def test_a_kept_copy_between_two_steps_costs_no_graph_of_the_step() -> None:
    xla_adapters.initialize()
    expected, _, _ = _trained_beside_copies(None)
    weights, graphs, compiles = _trained_beside_copies(lambda model: list(copy.deepcopy(model).parameters()))
    assert all(map(torch.equal, weights, expected))
    assert graphs == 0, "it is known from the run before"
    # The graphs that give the copies buffers of their own are compiled once: at the first look, and later.
    assert compiles[2:] == [0, 0]


def test_a_copy_that_was_moved_to_the_host_costs_no_graph_of_the_step() -> None:
    """Reading the copy labels the buffers as the copy's, which is gone when the next step begins."""
    xla_adapters.initialize()
    expected, _, _ = _trained_beside_copies(None)
    weights, graphs, compiles = _trained_beside_copies(lambda model: list(copy.deepcopy(model).cpu().parameters()))
    assert all(map(torch.equal, weights, expected))
    assert graphs == 0, "it is known from the run before"
    assert compiles == [0, 0, 0, 0]
