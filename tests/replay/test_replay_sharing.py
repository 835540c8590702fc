"""Modules whose parts change their order, and batches that come to share storage: replays do what traced steps do."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import nn

import xla_adapters
from tests.device import DEVICE
from tests.replay.alike import alike, update_of
from tests.support import update
from xla_adapters import CompiledStep

pytestmark = pytest.mark.isolated


class _InOrder(nn.Module):
    """Uses its submodules, parameters and buffers in the order in which it has them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"first": nn.Linear(4, 4), "middle": nn.Tanh(), "last": nn.Linear(4, 4)})
        self.factors = nn.ParameterDict({name: nn.Parameter(torch.full((4,), 1.0 + i)) for i, name in enumerate("ab")})
        self.register_buffer("shift", torch.full((4,), 0.5))
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.values():
            batch = block(batch)
        for number, factor in enumerate(self.factors.values()):
            batch = batch * factor + number
        for number, buffer in enumerate(self.buffers()):
            batch = batch * buffer + number
        return batch


@pytest.mark.parametrize("group", ["blocks._modules", "factors._parameters", "_buffers"])
def test_parts_of_a_module_in_another_order(group: str) -> None:
    def body(make: Callable[..., CompiledStep[Any]]) -> Any:
        model = _InOrder().to(DEVICE)
        step = make(update_of(model, torch.optim.SGD(model.parameters(), 0.01)))
        losses = []
        for number in range(12):
            if number == 6:
                parts = attrgetter(group)(model)
                name = next(iter(parts))
                parts[name] = parts.pop(name)
            losses.append(step(torch.full((2, 4), number / 12)))
        return losses, model

    step = alike(body)
    assert step.replays >= 6
    assert list(step.reasons) == [f"{group if '.' in group else '_InOrder._buffers'} has its entries in another order"]


_ALIASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda tensor: tensor,
    "detached": torch.Tensor.detach,
    "data": lambda tensor: tensor.data,
    "a view": lambda tensor: tensor.view(4, 2),
}


@pytest.mark.parametrize("how", _ALIASES.values(), ids=_ALIASES)
def test_a_batch_that_comes_to_be_a_buffer_which_the_step_changes(how: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def body(make: Callable[..., CompiledStep[Any]]) -> Any:
        model = nn.Linear(4, 3).to(DEVICE)
        model.register_buffer("memory", torch.ones(2, 4, device=DEVICE))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def function(batch: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            model.memory.mul_(0.9)
            return update((model(batch) + other.sum()).square().mean(), optimizer)

        step = make(function)
        other = how(torch.ones(2, 4, device=DEVICE))
        losses = [step(torch.full((2, 4), number / 12), other * (1 + number)) for number in range(6)]
        losses += [step(torch.full((2, 4), number / 12), how(model.memory)) for number in range(6)]
        return losses, model

    step = alike(body)
    assert step.replays == 4
    assert "a tensor of the batch is one of the state" in step.reasons


@pytest.mark.parametrize("how", _ALIASES.values(), ids=_ALIASES)
def test_a_batch_that_comes_to_be_a_parameter(how: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """It is read before and after the update, which an executable that was traced with another batch cannot know."""

    def body(make: Callable[..., CompiledStep[Any]]) -> Any:
        model = nn.Linear(4, 2).to(DEVICE)
        update = update_of(model, torch.optim.AdamW(model.parameters(), 0.1))
        step = make(lambda batch, other: (update(batch), other.sum())[0] + other.mean())
        losses = [step(torch.full((2, 4), number / 12), how(torch.ones(2, 4, device=DEVICE))) for number in range(6)]
        losses += [step(torch.full((2, 4), number / 12), how(model.weight)) for number in range(6)]
        return losses, model

    assert alike(body).replays == 4


def test_copies_in_a_batch_that_the_step_writes() -> None:
    def body(make: Callable[..., CompiledStep[Any]]) -> Any:
        model = nn.Linear(4, 3).to(DEVICE)
        update = update_of(model, torch.optim.SGD(model.parameters(), 0.1))
        step = make(lambda batch, other: update(batch.mul_(0.5) + other))
        batches = [torch.full((2, 4), 1.0 + number).to(DEVICE) for number in range(8)]
        return [step(batch, batch.clone() if index < 4 else batch) for index, batch in enumerate(batches)], model

    assert alike(body).replays == 0


class _TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(batch)))


# Calls 0 and 1 are traced, call 2 is the first that can be replayed.
@pytest.mark.parametrize("at", [1, 2, 3, 6])
@pytest.mark.parametrize("turned", [False, True], ids=["the same", "transposed"])
def test_weights_that_come_to_share_their_storage_and_cease_to(turned: bool, at: int) -> None:
    """Also between the traced steps and the first replay: an executable would update each of them by itself."""

    def body(make: Callable[..., CompiledStep[Any]]) -> Any:
        model = _TwoLayers().to(DEVICE)
        step = make(update_of(model, torch.optim.SGD(model.parameters(), 0.1)))
        losses = []
        for number in range(16):
            if number == at:
                model.second.weight.data = model.first.weight.data.t() if turned else model.first.weight.data
            if number == at + 6:
                model.second.weight.data = model.second.weight.data.clone()
            losses.append(step(torch.linspace(-1, 1, 8).view(2, 4) * (number + 1) / 16))
        return losses, model

    step = alike(body)
    assert step.replays >= 2 or at < 6


def _copied(target: nn.Module, source: nn.Module) -> None:
    for mine, other in zip(target.parameters(), source.parameters(), strict=True):
        mine.copy_(other)


def _copied_by_data(target: nn.Module, source: nn.Module) -> None:
    for mine, other in zip(target.parameters(), source.parameters(), strict=True):
        mine.data.copy_(other.data)


def _assigned(target: nn.Module, source: nn.Module) -> None:
    for mine, other in zip(target.parameters(), source.parameters(), strict=True):
        mine.data = other.detach().clone()


def _by_list(target: nn.Module, source: nn.Module) -> None:
    torch._foreach_copy_(list(target.parameters()), list(source.parameters()))


_COPIES: dict[str, Callable[[nn.Module, nn.Module], object]] = {
    "copy_": _copied,
    "data.copy_": _copied_by_data,
    "data =": _assigned,
    "foreach": _by_list,
    "load_state_dict": lambda target, source: target.load_state_dict(source.state_dict()),
}


@pytest.mark.parametrize("how", _COPIES.values(), ids=_COPIES)
def test_weights_that_a_step_copies_when_a_flag_says_so(how: Callable[[nn.Module, nn.Module], object]) -> None:
    """The target network of deep Q-learning. In the step it has the live network's buffers, which its update reuses."""

    def body(make: Callable[..., CompiledStep[Any]]) -> Any:
        live, target = _TwoLayers().to(DEVICE), _TwoLayers().requires_grad_(False).to(DEVICE)
        optimizer = torch.optim.AdamW(live.parameters(), 0.05)
        flag = {"copy": False}

        def function(batch: torch.Tensor) -> torch.Tensor:
            if flag["copy"]:
                with torch.no_grad():
                    how(target, live)
            return update((live(batch) - target(batch) - 1).square().mean(), optimizer)

        step = make(function)
        losses = []
        for number in range(14):
            flag["copy"] = number in (4, 5, 9)
            losses.append(step(torch.linspace(-1, 1, 8).view(2, 4) * (number + 1) / 14))
        return losses, live, target

    assert alike(body).replays >= 2


_PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda whole: whole.view(8, 4)[2:6],
    "transposed": lambda whole: whole[:16].view(4, 4).t(),
    "reshaped": lambda whole: whole[:16].view(4, 4),
    "of what is gone": lambda whole: whole.mul(2).view(8, 4)[2:6],
}


@pytest.mark.parametrize("at", [2, 4])
@pytest.mark.parametrize("part", _PARTS.values(), ids=_PARTS)
def test_weights_that_come_to_be_a_part_of_a_larger_tensor(
    part: Callable[[torch.Tensor], torch.Tensor], at: int
) -> None:
    # Before the larger tensor is made: it would be a part of the first step's graph.
    xla_adapters.initialize()

    def body(make: Callable[..., CompiledStep[Any]]) -> Any:
        model = _TwoLayers().to(DEVICE)
        step = make(update_of(model, torch.optim.SGD(model.parameters(), 0.1)))
        whole = torch.linspace(-0.5, 0.5, 32, device=DEVICE)
        losses, sums = [], []
        for number in range(12):
            if number == at:
                model.first.weight.data = part(whole)
            if number in (7, 9):
                whole.mul_(0.5)
            losses.append(step(torch.linspace(-1, 1, 8).view(2, 4) * (number + 1) / 12))
            if number > 8:
                sums.append(whole.sum().cpu())
        return losses, sums, model, whole

    alike(body)


_VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda value: value.t(),
    "transposed twice": lambda value: value.t().t(),
    "a copy of the transposed": lambda value: value.t().contiguous(),
    "reshaped": lambda value: value.view(2, 8).view(4, 4),
    "rows": lambda value: value.reshape(-1)[:16].reshape(4, 4),
    "strided": lambda value: value.as_strided((4, 4), (4, 1)),
}


@pytest.mark.parametrize("name", ["weight", "buffer"])
@pytest.mark.parametrize("view", _VIEWS.values(), ids=_VIEWS)
def test_tensors_that_come_to_be_a_view_of_themselves(view: Callable[[torch.Tensor], torch.Tensor], name: str) -> None:
    def body(make: Callable[..., CompiledStep[Any]]) -> Any:
        model = _TwoLayers().to(DEVICE)
        buffer = torch.linspace(-1, 1, 16, device=DEVICE).view(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model.register_buffer("turn", buffer)

        def function(batch: torch.Tensor) -> torch.Tensor:
            return update(model(batch @ model.turn).square().mean(), optimizer)

        step, losses = make(function), []
        for number in range(14):
            if number in (4, 9):
                tensor = model.first.weight if name == "weight" else model.turn
                tensor.data = view(tensor.data)
            losses.append(step(torch.linspace(-1, 1, 8).view(2, 4) * (number + 1) / 14))
        return losses, model

    assert alike(body).replays >= 2


def _shared(model: _TwoLayers) -> None:
    model.first.weight.grad = model.second.weight.grad


def _aliased(model: _TwoLayers) -> None:
    assert model.second.weight.grad is not None
    model.first.weight.grad = model.second.weight.grad.detach()


def _one_buffer(model: _TwoLayers) -> None:
    assert model.second.weight.grad is not None
    model.first.weight.grad = model.second.weight.grad.clone()


def _parts_of_one(model: _TwoLayers) -> None:
    whole = torch.zeros(2, 4, 4, device=DEVICE)
    model.first.weight.grad, model.second.weight.grad = whole[0], whole[1]


@pytest.mark.parametrize("zeroed", [False, True], ids=["summed", "zeroed"])
@pytest.mark.parametrize("how", [_shared, _aliased, _one_buffer, _parts_of_one])
def test_gradients_that_come_to_share_and_cease_to(how: Callable[[_TwoLayers], None], zeroed: bool) -> None:
    def body(make: Callable[..., CompiledStep[Any]]) -> Any:
        model = _TwoLayers().to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)

        def function(batch: torch.Tensor) -> torch.Tensor:
            if zeroed:
                optimizer.zero_grad(set_to_none=False)
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = make(function)
        losses = []
        for number in range(15):
            if number == 5:
                how(model)
            if number == 11:
                model.first.weight.grad = torch.ones(4, 4, device=DEVICE)
            losses.append(step(torch.linspace(-1, 1, 8).view(2, 4) * (number + 1) / 15))
        return losses, model, [parameter.grad for parameter in model.parameters()]

    assert alike(body).replays >= 2


def test_a_parameter_without_dimensions_does_not_take_others_with_it() -> None:
    """torch_xla keeps a number that was uploaded, and gives its buffer to the next tensor of that value."""
    for number in range(3):
        model = nn.Linear(2, 2)
        model.scale, model.again = (nn.Parameter(torch.tensor(0.75)) for _ in range(2))
        model = model.to(DEVICE)
        updates = torch.optim.AdamW(model.parameters(), 0.01)

        def body(batch: torch.Tensor, model: Any = model, updates: Any = updates) -> torch.Tensor:
            return update((model(batch) * model.scale + model.again).square().mean(), updates)

        step = CompiledStep(body)
        for _ in range(5):
            step(torch.ones(2, 2).to(DEVICE))
        assert step.program.replays, step.program.replay_reasons
        # As `load_state_dict` does.
        with torch.no_grad():
            model.scale.copy_(torch.tensor(0.75))
        step(torch.ones(2, 2).to(DEVICE))
        assert model.scale.item() < 0.75 + number
        assert torch.tensor(0.75).to(DEVICE).item() == 0.75
