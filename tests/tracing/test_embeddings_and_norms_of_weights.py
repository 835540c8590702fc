"""Embeddings with options, and weights that are computed from others, train as on the plain CPU, in one graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

import xla_adapters
from tests.device import DEVICE
from tests.support import update
from xla_adapters.errors import DenseGradientWarning, UnsupportedOptionError
from xla_adapters.replay.compiled_step import CompiledStep

pytestmark = pytest.mark.isolated

_HOOKED = "has a hook"
# With why steps are traced; None if they are replayed.
_KINDS: dict[str, tuple[dict[str, Any], Callable[[nn.Module], nn.Module] | None, str | None]] = {
    "sparse": ({"sparse": True}, None, None),
    "max_norm": ({"max_norm": 0.5}, None, None),
    "max_norm, sparse": ({"max_norm": 0.7, "norm_type": 1.0, "sparse": True}, None, None),
    "frequency": ({"scale_grad_by_freq": True}, None, None),
    "weight_norm": ({}, nn.utils.weight_norm, _HOOKED),
    "weight_norm, parametrized": ({}, parametrizations.weight_norm, None),
    "spectral_norm": ({}, nn.utils.spectral_norm, _HOOKED),
    "spectral_norm, parametrized": ({}, parametrizations.spectral_norm, None),
}


class _Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        options, around, _ = _KINDS[kind]
        self.embedding = nn.Embedding(16, 8, **options)
        linear: nn.Module = nn.Linear(8, 4)
        self.linear = linear if around is None else around(linear)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.linear(self.embedding(ids))
        return scores


def _train(kind: str, device: str, steps: int = 6) -> tuple[list[float], nn.Module, Any]:
    model = _Net(kind).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def train(ids: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return update(functional.cross_entropy(model(ids), classes), optimizer)

    step: Any = CompiledStep(train) if device == DEVICE else train
    losses = []
    for number in range(steps):
        generator = torch.Generator().manual_seed(number)
        # Some rows are looked up twice.
        ids = torch.randint(0, 16, (12,), generator=generator)
        losses.append(float(step(ids, torch.randint(0, 4, (12,), generator=generator))))
    return losses, model, step


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", _KINDS)
def test_as_on_the_cpu(kind: str) -> None:
    xla_adapters.initialize()
    expected, on_cpu, _ = _train(kind, "cpu")
    # The self-test of replays compiles.
    assert xla_adapters.get_runtime().replay_works
    with warnings.catch_warnings(record=True) as said, xla_adapters.count() as counts:
        warnings.simplefilter("always")
        losses, model, step = _train(kind, DEVICE)
    assert losses == pytest.approx(expected, abs=1e-6)
    for name, value in on_cpu.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name].cpu(), value, rtol=1e-5, atol=1e-6, msg=name)
    assert (step.program.graphs, step.program.calls) == (1, 6)
    assert counts.executions == 6
    warned = [warning for warning in said if issubclass(warning.category, DenseGradientWarning)]
    assert len(warned) == ("sparse" in kind)
    expected = _KINDS[kind][2]
    if expected is None:
        assert step.replays == 4, step.reasons
    else:
        assert any(expected in reason for reason in step.reasons)


def test_a_failed_step_does_not_shorten_rows() -> None:
    xla_adapters.initialize()
    embedding = nn.Embedding(4, 3, max_norm=0.1).to(DEVICE)
    before = embedding.weight.detach().cpu().clone()
    with pytest.raises(KeyError), xla_adapters.step():
        embedding(torch.tensor([0, 2], device=DEVICE))
        raise KeyError
    assert torch.equal(embedding.weight.detach().cpu(), before)
    with xla_adapters.step():
        rows = embedding(torch.tensor([0, 2], device=DEVICE))
    assert rows.detach().cpu().norm(dim=1).tolist() == pytest.approx([0.1, 0.1])
    assert torch.equal(embedding.weight.detach().cpu()[1::2], before[1::2])


def test_sparse_adam_is_refused_by_name() -> None:
    xla_adapters.initialize()
    embedding = nn.Embedding(4, 3, sparse=True).to(DEVICE)
    optimizer = torch.optim.SparseAdam(embedding.parameters())
    with pytest.raises(UnsupportedOptionError, match=r"SparseAdam .* takes sparse gradients only"), xla_adapters.step():
        embedding(torch.tensor([0, 2], device=DEVICE)).sum().backward()
        optimizer.step()


class _Symmetric(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.triu() + values.triu(1).mT

    def right_inverse(self, values: torch.Tensor) -> torch.Tensor:
        return values.triu()


def test_a_weight_is_parametrized_on_the_device() -> None:
    xla_adapters.initialize()

    def trained(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        linear = nn.Linear(4, 4).to(device)
        weight = linear.weight
        parametrize.register_parametrization(linear, "weight", _Symmetric())
        assert linear.parametrizations["weight"].original is weight
        optimizer = torch.optim.SGD(linear.parameters(), 0.1)

        def train(values: torch.Tensor) -> torch.Tensor:
            return update(linear(values).square().sum(), optimizer)

        step: Any = CompiledStep(train) if device == DEVICE else train
        losses = [step(torch.full((2, 4), float(number))).cpu() for number in range(4)]
        linear.weight = torch.ones(4, 4, device=device)
        assert linear.parametrizations["weight"].original is weight
        losses += [step(torch.ones(2, 4)).cpu() for _ in range(3)]
        parametrize.remove_parametrizations(linear, "weight")
        assert linear.weight is weight
        return [*losses, linear.weight.detach().cpu()]

    for found, expected in zip(trained(DEVICE), trained("cpu"), strict=True):
        torch.testing.assert_close(found, expected)
