"""Tensors of the batch as arguments of calls that write something else: such steps are replayed, and rightly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.device import DEVICE
from tests.replay.alike import alike
from xla_adapters import CompiledStep

pytestmark = pytest.mark.isolated

# Writes the second into the first.
_Note = Callable[[torch.Tensor, torch.Tensor], None]
_GETS_A_GRADIENT = "a tensor of its batch gets a gradient in the step"
# In a dictionary, since code that reads a global variable of another value is traced again.
_held: dict[str, torch.Tensor] = {}


class _Memory(nn.Module):
    """Has a running mean of what it is given."""

    def __init__(self, note: _Note) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.note = note
        self.register_buffer("mean", torch.zeros(4, 8))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.note(self.mean, batch)
        return self.linear(batch) + self.mean


def _normalized_product(model: nn.Module, anchors: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    scores = F.normalize(model(anchors)) @ F.normalize(anchors).T
    return F.cross_entropy(scores * 20, torch.arange(4, device=scores.device)) + others.mean()


def _tensordot(model: nn.Module, anchors: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    return torch.tensordot(model(anchors), anchors, dims=2) + torch.norm(others - model(others))


_LOSSES = {"normalized product": _normalized_product, "tensordot": _tensordot}


def _itself(mean: torch.Tensor, batch: torch.Tensor) -> None:
    mean.mul_(0.9).add_(batch)


def _detached(mean: torch.Tensor, batch: torch.Tensor) -> None:
    mean.mul_(0.9).add_(batch.detach())


def _row(mean: torch.Tensor, batch: torch.Tensor) -> None:
    mean[0].lerp_(batch[1], 0.5)


def _by_index(mean: torch.Tensor, batch: torch.Tensor) -> None:
    mean[:2].copy_(batch[:2])


def _out(mean: torch.Tensor, batch: torch.Tensor) -> None:
    torch.add(mean * 0.5, batch, out=mean)


_NOTES = (_itself, _detached, _row, _by_index, _out)


def _losses(make: Callable[..., CompiledStep[Any]], model: nn.Module, loss_of: Callable[..., torch.Tensor]) -> Any:
    model.to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def function(batch: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch, other)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = make(function)
    return [step(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(7)], model


@pytest.mark.parametrize("loss_of", _LOSSES.values(), ids=_LOSSES)
def test_losses_that_compare_a_batch_with_itself(loss_of: Callable[..., torch.Tensor]) -> None:
    step = alike(lambda make: _losses(make, nn.Linear(8, 8, bias=False), loss_of))
    assert step.replays == 4, step.reasons


@pytest.mark.parametrize("note", _NOTES)
def test_a_batch_that_is_written_into_a_buffer(note: _Note) -> None:
    def loss_of(model: nn.Module, batch: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return (model(batch) * batch).mean()  # type: ignore[no-any-return]

    step = alike(lambda make: _losses(make, _Memory(note), loss_of))
    assert step.replays == 4, step.reasons


_ALIASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda tensor: tensor,
    "detached": torch.Tensor.detach,
    "data": lambda tensor: tensor.data,
}


class _Holder(nn.Module):
    """Holds a tensor as a plain attribute."""

    def __init__(self, held: torch.Tensor) -> None:
        super().__init__()
        self.held = held
        self.register_buffer("mean", torch.zeros(4, 8, device=DEVICE))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.5).add_(self.held)
        return (self.mean * batch).mean()


@pytest.mark.parametrize("how", _ALIASES.values(), ids=_ALIASES)
@pytest.mark.parametrize("where", ["in a dictionary", "in a module"])
@pytest.mark.parametrize("replay", ["auto", True])
def test_what_user_code_holds_is_no_batch_though_it_was_one(
    replay: Any, where: str, how: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """The held tensor stays while the batch changes."""

    def body(make: Callable[..., CompiledStep[Any]]) -> Any:
        given = [torch.full((4, 8), 1.0 + number).to(DEVICE) for number in range(3)]
        mean = torch.zeros(4, 8, device=DEVICE)
        _held["first"] = how(given[0])
        holder = _Holder(how(given[0]))

        def function(batch: torch.Tensor) -> torch.Tensor:
            mean.mul_(0.5).add_(_held["first"])
            return (mean * batch).mean()

        step = make(function if where == "in a dictionary" else lambda batch: holder(batch))
        return [step(given[number]) for number in (0, 0, 0, 0, 1, 2, 0, 1)], mean, holder

    assert not alike(body, step_replay=replay).replays


def test_gradients_of_a_batch_are_where_they_belong() -> None:
    def body(make: Callable[..., CompiledStep[Any]]) -> Any:
        model = nn.Linear(8, 1).to(DEVICE)

        def function(batch: torch.Tensor) -> torch.Tensor:
            loss = model(batch).square().mean()
            loss.backward()
            return loss.detach()

        step, found = make(function), []
        for _ in range(6):
            batch = torch.randn(4, 8).to(DEVICE).requires_grad_()
            found += [step(batch), batch.grad]
        return found

    step = alike(body)
    assert not step.replays
    assert _GETS_A_GRADIENT in step.reasons
