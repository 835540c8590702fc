"""What a module is moved to the device with, and what it is afterwards."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

import xla_adapters
from tests.isolation import isolated
from xla_adapters.replay.compiled_step import CompiledStep


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(12, 8)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embedding(ids)))  # type: ignore[no-any-return]


def _losses(device: str, *, before: bool, held: bool = False) -> list[float]:
    model = _Tied()
    reference = weakref.ref(model.embedding.weight) if held else None
    optimizer: Any = torch.optim.AdamW(model.parameters(), 0.05) if before else None
    model.to(device)
    assert model.head.weight is model.embedding.weight
    assert reference is None or reference() is not None or device != "cpu"
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 0.05)
    ids = torch.arange(12).to(device)

    def train(ids: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(ids), ids.flip(0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = train if device == "cpu" else CompiledStep(train)
    return [float(run(ids)) for _ in range(5)]


@isolated
@pytest.mark.parametrize("before", [False, True], ids=["optimizer after", "optimizer before"])
def test_it_trains_as_on_the_host(before: bool) -> None:
    xla_adapters.initialize()
    assert _losses("xla", before=before) == pytest.approx(_losses("cpu", before=before), abs=1e-5)


@isolated
def test_parameters_are_the_same_objects() -> None:
    xla_adapters.initialize()
    model = _Tied()
    calls: list[int] = []
    weight = model.embedding.weight
    weight.factor = 3  # type: ignore[attr-defined]
    weight.register_hook(lambda gradient: calls.append(1))
    names = dict(model.named_parameters())
    model(torch.arange(12)).sum().backward()
    gradient = weight.grad
    assert gradient is not None
    moved = model.to("xla")
    assert moved is model
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == {
        name: id(parameter) for name, parameter in names.items()
    }
    assert weight.device.type == "xla"
    assert weight.requires_grad
    assert weight.factor == 3  # type: ignore[attr-defined]
    assert weight.grad is not None
    assert torch.equal(weight.grad.cpu(), gradient)
    calls.clear()
    model(torch.arange(12, device="xla")).sum().backward()
    assert calls


@isolated
def test_tied_weights_stay_tied_where_the_object_cannot_be_kept() -> None:
    xla_adapters.initialize()
    assert _losses("xla", before=False, held=True) == pytest.approx(_losses("cpu", before=False), abs=1e-5)


@isolated
def test_back_and_in_other_dtypes() -> None:
    xla_adapters.initialize()
    model = _Tied()
    model.register_buffer("first", torch.ones(2))
    model.inner.register_buffer("second", model.first)
    model.to("xla").to("cpu")
    assert model.head.weight is model.embedding.weight
    assert model.inner.second is model.first
    model.to("xla", torch.bfloat16).float()
    assert model.head.weight is model.embedding.weight
    assert model.inner.second is model.first
    assert model.head.weight.dtype == torch.float32
    assert model.to("meta").head.weight is model.embedding.weight


@isolated
def test_a_module_that_is_made_and_moved_in_a_step() -> None:
    xla_adapters.initialize()
    model = nn.Sequential(nn.Linear(3, 3).to("xla"))
    for _ in range(2):
        with xla_adapters.step():
            model[0] = nn.Linear(3, 2).to("xla")
            model[0].weight.data.fill_(2.0)
            result = model(torch.ones(2, 3, device="xla")).sum() - 2 * model[0].bias.sum()
            result.backward()
        assert result.item() == pytest.approx(24.0, abs=1e-5)
        assert torch.equal(model[0].weight.grad.cpu(), torch.full((2, 3), 2.0))
