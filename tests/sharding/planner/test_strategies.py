"""Each strategy is carried out on the shards it names, and gives what the operator gives on the whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.isolation import isolated
from xla_adapters.sharding import Mesh
from xla_adapters.sharding.planner import Topology
from xla_adapters.sharding.planner.capture import capture
from xla_adapters.sharding.planner.costs import Fabric
from xla_adapters.sharding.planner.graph import Operator, build
from xla_adapters.sharding.planner.layouts import Strategy
from xla_adapters.sharding.planner.strategies import strategies_of

_PARTS = 2
_RULES = Fabric(mesh=Mesh.data_and_model(1, _PARTS), topology=Topology.preset("v5e"))


class _Call(nn.Module):
    """A function of two tensors that need gradients, and perhaps of a third."""

    def __init__(self, function: Any, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.tensors = nn.ParameterList(tensors)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        # `cos` makes activations of parameters.
        return self.function(*(tensor.cos() for tensor in self.tensors)).sum() + rows.sum()


def _tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


_CASES: dict[str, tuple[str, Any, list[tuple[int, ...]], int]] = {
    # name: operator, function, shapes, fewest strategies
    "linear": ("linear", F.linear, [(4, 6, 8), (10, 8), (10,)], 7),
    "addmm": ("addmm", torch.addmm, [(10,), (6, 8), (8, 10)], 5),
    "mm": ("mm", torch.mm, [(6, 8), (8, 10)], 5),
    "bmm": ("bmm", torch.bmm, [(4, 6, 8), (4, 8, 10)], 7),
    "matmul": ("matmul", torch.matmul, [(4, 2, 6, 8), (4, 2, 8, 10)], 9),
    "matmul, broadcast": ("matmul", torch.matmul, [(4, 2, 6, 8), (1, 2, 8, 10)], 7),
    "attention": (
        "scaled_dot_product_attention", F.scaled_dot_product_attention, [(4, 2, 6, 8), (4, 2, 10, 8), (4, 2, 10, 8)], 4,
    ),
    "add, broadcast": ("add", torch.add, [(4, 6, 8), (6, 1)], 4),
    "convolution": ("conv2d", F.conv2d, [(4, 6, 8, 8), (10, 6, 3, 3), (10,)], 6),
    "cat": ("cat", lambda a, b: torch.cat([a, b], 1), [(4, 6, 8), (4, 2, 8)], 4),
    "layer norm": ("layer_norm", lambda x, w, b: F.layer_norm(x, (8,), w, b), [(4, 6, 8), (8,), (8,)], 4),
    "softmax": ("softmax", lambda x, y: torch.softmax(x, -1) * y.sum(), [(4, 6, 8), (2,)], 4),
    "mean": ("mean", lambda x, y: x.mean(1, keepdim=True) * y.sum(), [(4, 6, 8), (2,)], 4),
}  # fmt: skip
# Their splits exchange values in the middle, which this test does not do.
_INSIDE = {("layer norm", 2), ("softmax", 2), ("cat", 1)}


@isolated
@pytest.mark.parametrize("name", _CASES)
def test_shards_give_the_whole(name: str) -> None:
    target, function, shapes, fewest = _CASES[name]
    tensors = _tensors(*shapes)
    found = build(capture(_Call(function, tensors), (torch.zeros(3),), {}, reduce=True))
    operator = next(item for item in found.operators if item.target == target)
    strategies, known = strategies_of(operator, _RULES)
    assert known
    assert len(strategies) >= fewest, [(item.output, item.wants) for item in strategies]
    if name in ("softmax", "mean"):
        tensors = tensors[:1]
        function = {"softmax": lambda x: torch.softmax(x, -1), "mean": lambda x: x.mean(1, keepdim=True)}[name]
    whole = function(*tensors)
    for strategy in strategies:
        if (name, strategy.output) in _INSIDE:
            assert strategy.charges
            continue
        parts = [_run(function, tensors, operator, strategy, part) for part in range(_PARTS)]
        torch.testing.assert_close(_joined(parts, strategy, name), whole, msg=str(strategy))


def _run(function: Any, tensors: list[torch.Tensor], operator: Operator, strategy: Strategy, part: int) -> Any:
    shards = []
    for place, (want, tensor) in enumerate(zip(strategy.wants, tensors, strict=True)):
        if (_is_sum(strategy) and want.state is None) or (strategy.scatters and _added(place, operator)):
            # What is added to a sum is added once.
            tensor = tensor if part == 0 else torch.zeros_like(tensor)
        elif want.state is not None:
            tensor = tensor.chunk(_PARTS, want.state)[part]
        shards.append(tensor)
    return function(*shards)


def _added(place: int, operator: Operator) -> bool:
    return (operator.target, place) in {("linear", 2), ("addmm", 0), ("conv2d", 2)}


def _is_sum(strategy: Strategy) -> bool:
    return strategy.output is None and bool(strategy.charges)


def _joined(parts: list[torch.Tensor], strategy: Strategy, name: str) -> torch.Tensor:
    if name == "mean" and _is_sum(strategy):
        return sum(parts, torch.zeros(())) / _PARTS
    if strategy.scatters or _is_sum(strategy):
        return sum(parts, torch.zeros((), dtype=torch.float64))
    if strategy.output is None:
        assert torch.equal(parts[0], parts[1])
        return parts[0]
    return torch.cat(parts, strategy.output)


@isolated
def test_embedding_over_the_vocabulary_is_a_sum() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 8)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids).sum()

    found = build(capture(Words(), (torch.zeros(4, 6, dtype=torch.long),), {}, reduce=True))
    strategies, _ = strategies_of(found.operators[0], _RULES)
    by_table = {item.wants[0].state: item for item in strategies if not item.scatters}
    assert by_table[0].output is None
    assert by_table[0].charges[0].kind == "all-reduce"
    assert by_table[1].output == 2
    assert not by_table[1].charges


@isolated
def test_what_lacks_the_split_label_has_a_partial_gradient() -> None:
    function, tensors = F.linear, _tensors((4, 6, 8), (10, 8))
    found = build(capture(_Call(function, tensors), (torch.zeros(3),), {}, reduce=True))
    operator = next(item for item in found.operators if item.target == "linear")
    for strategy in strategies_of(operator, _RULES)[0]:
        if strategy.output is None or strategy.scatters:
            continue
        for part, want in enumerate(strategy.wants):
            shards = [copy.deepcopy(tensor).requires_grad_() for tensor in tensors]
            used = [
                shard if item.state is None else shard.chunk(_PARTS, item.state)[0]
                for shard, item in zip(shards, strategy.wants, strict=True)
            ]
            function(*used).sum().backward()
            whole = copy.deepcopy(tensors[part]).requires_grad_()
            function(*[whole if place == part else other for place, other in enumerate(tensors)]).sum().backward()
            if want.state is None:
                assert want.partial == (not torch.allclose(shards[part].grad, whole.grad))
