"""What is captured: tied weights once, the batch's dimension found, equal layers taken twice, the model untouched.

A split dimension followed through a view is the split that slicing the result gives.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from tests.sharding.planner.models import gpt2, llama, tokens
from xla_adapters.sharding.planner.capture import Capture, CaptureError, capture, shape_of
from xla_adapters.sharding.planner.graph import VIEWS, broadcast, build, fold, reshaped

pytestmark = pytest.mark.isolated


def test_weights_and_model_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    before = {name: (id(parameter), parameter.clone()) for name, parameter in model.named_parameters()}
    found = capture(model, (torch.zeros(6, 4),), {}, reduce=True)
    assert sorted(found.parameters.values()) == sorted(before)
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0]
        assert torch.equal(parameter, before[name][1])
    assert all(parameter.is_meta for parameter in found.skeleton.module.parameters())


def test_tied_weights_have_one_name() -> None:
    found = capture(gpt2(), tokens(), {}, reduce=True)
    assert "transformer.wte.weight" in found.parameters.values()
    assert "lm_head.weight" not in found.parameters.values()


def test_the_batch_is_followed_through_any_operator() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(6, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            flat = x.permute(1, 0, 2).reshape(-1, 6)
            return (flat @ self.weight).view(3, -1, 5).transpose(0, 2)

    found = capture(Odd(), (torch.zeros(6, 3, 6),), {}, reduce=True)
    last = [node for node in found.nodes if node.op == "call_function"][-1]
    assert shape_of(last) == (5, 6, 3)
    assert found.batch[last] == 1


@pytest.mark.parametrize("layers", [3, 9])
def test_of_equal_layers_two_are_captured(layers: int) -> None:
    found = capture(llama(num_hidden_layers=layers), tokens(), {}, reduce=True)
    names = [name for name in found.parameters.values() if name.endswith("q_proj.weight")]
    assert names == ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"]
    folded = fold(build(found), found.skeleton)
    assert folded.complete
    last = f"model.layers.{layers - 1}.self_attn.q_proj.weight"
    assert folded.parameters.of(last) == "model.layers.0.self_attn.q_proj.weight"
    assert found.skeleton.originals("model.layers.1.mlp") == tuple(f"model.layers.{n}.mlp" for n in range(1, layers))


class _Layer(nn.Module):
    def __init__(self, *, scale: float) -> None:
        super().__init__()
        self.first, self.second, self.scale = nn.Linear(8, 8), nn.Linear(8, 8), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()) * self.scale


class _Stack(nn.Module):
    def __init__(self, scales: list[float]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(scale=scale) for scale in scales)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def _captured(scales: list[float]) -> Capture:
    return capture(_Stack(scales), (torch.zeros(4, 8),), {}, reduce=True)


def test_layers_that_differ_in_a_setting_are_not_one() -> None:
    found = _captured([1.0, 2.0, 1.0, 1.0, 1.0])
    kept = [name for name in found.parameters.values() if name.endswith("first.weight")]
    assert kept == [f"layers.{place}.first.weight" for place in (0, 1, 2, 3)]
    folded = fold(build(found), found.skeleton)
    assert folded.parameters.of("layers.4.first.weight") == "layers.0.first.weight"
    assert folded.parameters.of("layers.1.first.weight") == "layers.1.first.weight"


def test_layers_with_other_given_specs_are_not_one() -> None:
    found = capture(_Stack([1.0] * 4), (torch.zeros(4, 8),), {"layers.3.first.weight": ("model", None)}, reduce=True)
    folded = fold(build(found), found.skeleton)
    assert folded.parameters.of("layers.2.first.weight") == "layers.0.first.weight"
    assert folded.parameters.of("layers.3.first.weight") == "layers.3.first.weight"


def test_a_model_that_reads_values_cannot_be_captured() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) if x.sum().item() > 0 else x

    with pytest.raises(CaptureError, match="data-dependent"):
        capture(Reads(), (torch.zeros(2, 4),), {}, reduce=True)


_SHAPES = [
    ((8, 16, 64), (8, 16, 4, 16)),
    ((8, 16, 4, 16), (8, 16, 64)),
    ((8, 16, 64), (128, 64)),
    ((128, 64), (8, 16, 64)),
    ((1, 16, 64), (16, 64)),
    ((8, 2, 2, 16), (8, 4, 16)),
    ((8, 12), (12, 8)),
    ((4, 6, 4), (2, 2, 24, 1)),
    ((8,), (8, 1)),
]


@pytest.mark.parametrize(("before", "after"), _SHAPES)
def test_reshape(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    tensor = torch.arange(torch.Size(before).numel()).reshape(before)
    whole = tensor.reshape(after)
    dims = reshaped(before, after)
    for dim, to in enumerate(dims):
        if to is None or before[dim] % 2 or after[to] % 2:
            continue
        local = list(after)
        local[to] //= 2
        for part, expected in zip(tensor.chunk(2, dim), whole.chunk(2, to), strict=True):
            assert torch.equal(part.reshape(local), expected), (dim, to)


def test_what_cannot_be_followed_is_lost() -> None:
    assert reshaped((8, 16, 64), (128, 64)) == (0, None, 1)
    assert reshaped((8, 16, 4, 16), (8, 16, 64)) == (0, 1, 2, None)
    assert broadcast((1, 64), (8, 16, 64)) == (None, 2)


@pytest.mark.parametrize(
    ("name", "args"),
    [("transpose", (1, 2)), ("transpose", (-1, 0)), ("permute", ([2, 0, 1],)), ("select", (1, 0)), ("unsqueeze", (1,))],
)
def test_moves(name: str, args: tuple[object, ...]) -> None:
    tensor = torch.arange(2 * 4 * 6).reshape(2, 4, 6)
    move = getattr(torch, name)
    whole = move(tensor, *args)
    dims = VIEWS[name](tuple(tensor.shape), tuple(whole.shape), args)
    followed = [(dim, to) for dim, to in enumerate(dims) if to is not None]
    assert len(followed) == (2 if name == "select" else 3)
    for (dim, to), half in itertools.product(followed, range(2)):
        assert torch.equal(move(tensor.chunk(2, dim)[half], *args), whole.chunk(2, to)[half])
