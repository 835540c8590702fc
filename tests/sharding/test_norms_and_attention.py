"""What replaces torch's norms and attention under SPMD: torch's values and gradients.

Values that steps write in place, and that nobody annotated: one graph for the first step and the later ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import xla_adapters
from tests.isolation import isolated
from tests.support import Loop
from xla_adapters.lowerings.layers import (
    batch_norm_statistics,
    group_norm,
    layer_norm,
    scaled_dot_product_attention,
)
from xla_adapters.runtime.transfers import uploading
from xla_adapters.sharding import Mesh
from xla_adapters.sharding.mesh import tiles_of

pytestmark = pytest.mark.isolated


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def assert_same(
    ours: Callable[..., torch.Tensor], stock: Callable[..., torch.Tensor], inputs: list[torch.Tensor]
) -> None:
    results = []
    for function in (ours, stock):
        copies = [value.detach().clone().requires_grad_() for value in inputs]
        result = function(*copies)
        (result * torch.arange(result.numel()).reshape(result.shape) / result.numel()).sum().backward()
        results.append([result.detach(), *(copy.grad for copy in copies)])
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-5)


_MASK = torch.tensor([[True, False, True, True, False], [False] * 5, [True] * 5])
_ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scale": 0.3},
    "boolean mask, a row that sees nothing": {"attn_mask": _MASK},
    "mask that is added": {"attn_mask": torch.where(_MASK, 0.0, -1e9)},
    "mask of minus infinity": {"attn_mask": torch.where(_MASK, 0.5, -torch.inf)},
    "causal": {"is_causal": True},
}


@pytest.mark.parametrize("name", _ATTENTION)
def test_attention(name: str) -> None:
    options = _ATTENTION[name]
    inputs = [values(2, 4, 3, 8), values(2, 4, 5, 8, seed=1), values(2, 4, 5, 6, seed=2)]
    assert_same(
        lambda *qkv: scaled_dot_product_attention(*qkv, **options),
        lambda *qkv: functional.scaled_dot_product_attention(*qkv, **options),
        inputs,
    )


def test_attention_of_grouped_heads_other_ranks_and_half_precision() -> None:
    grouped = [values(2, 4, 3, 8), values(2, 2, 5, 8, seed=1), values(2, 2, 5, 8, seed=2)]
    flat = [values(4, 3, 8), values(4, 5, 8, seed=1), values(4, 5, 8, seed=2)]
    for inputs, options in ((grouped, {"enable_gqa": True}), (flat, {})):
        assert_same(
            lambda *qkv, options=options: scaled_dot_product_attention(*qkv, **options),
            lambda *qkv, options=options: functional.scaled_dot_product_attention(*qkv, **options),
            inputs,
        )
    half = [value.detach().bfloat16() for value in (values(2, 4, 3, 8), values(2, 4, 3, 8, seed=1), values(2, 4, 3, 8))]
    ours, stock = scaled_dot_product_attention(*half), functional.scaled_dot_product_attention(*half)
    assert ours.dtype == stock.dtype == torch.bfloat16
    torch.testing.assert_close(ours, stock, atol=2e-2, rtol=2e-2)


def test_attention_drops_out() -> None:
    torch.manual_seed(0)
    ones = torch.ones(1, 2, 64, 64)
    dropped = scaled_dot_product_attention(ones, ones, ones, dropout_p=0.5)
    assert 0.9 < float(dropped.mean()) < 1.1
    assert float(dropped.std()) > 0.01


def test_norms() -> None:
    inputs = [values(6, 8, 5), values(8, 5, seed=1), values(8, 5, seed=2)]
    assert_same(
        lambda x, w, b: layer_norm(x, (8, 5), w, b, 1e-3),
        lambda x, w, b: functional.layer_norm(x, (8, 5), w, b, 1e-3),
        inputs,
    )
    assert_same(lambda x: layer_norm(x, (5,)), lambda x: functional.layer_norm(x, (5,)), inputs[:1])
    channels = [values(6, 8, 5), values(8, seed=1), values(8, seed=2)]
    assert_same(lambda x, w, b: group_norm(x, 4, w, b), lambda x, w, b: functional.group_norm(x, 4, w, b), channels)
    assert_same(
        lambda x, w, b: batch_norm_statistics(x, w, b, 1e-5)[0],
        lambda x, w, b: functional.batch_norm(x, None, None, w, b, training=True),
        channels,
    )
    _, mean, variance = batch_norm_statistics(channels[0], None, None, 1e-5)
    torch.testing.assert_close(mean, channels[0].detach().mean((0, 2)))
    torch.testing.assert_close(variance, channels[0].detach().var((0, 2), correction=0))


STEPS = 4


def _uploaded(value: torch.Tensor) -> torch.Tensor:
    with uploading():
        return value.to("xla")


_COPIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "to": lambda value: value.to("xla"),
    "uploading": _uploaded,
    "to_device": lambda value: xla_adapters.get_runtime().transfers.to_device(value),
}


@isolated(env={"CPU_NUM_DEVICES": "4"})
@pytest.mark.parametrize("copy", _COPIES)
@pytest.mark.parametrize("shape", [(), (1,), (3,)], ids=str)
def test_a_running_sum(copy: str, shape: tuple[int, ...]) -> None:
    xla_adapters.initialize(spmd=True)
    rows = torch.arange(8 * 3.0).reshape(8, 3)
    batch = _uploaded(rows)
    xla_adapters.get_runtime().spmd.shard(batch, tiles_of(Mesh(shape=(4,), axis_names=("data",)), ("data", None)))
    total = _COPIES[copy](torch.zeros(shape))
    with xla_adapters.count() as counts:
        for _ in range(STEPS):
            with xla_adapters.step(name="sum"):
                total += batch.mean(0) if shape == (3,) else batch.mean()
    assert (counts.compiles, counts.executions) == (1, STEPS)
    assert torch.equal(total.cpu(), (STEPS * (rows.mean(0) if shape == (3,) else rows.mean())).expand(shape))


@isolated(env={"CPU_NUM_DEVICES": "4"})
def test_a_model_without_annotations() -> None:
    xla_adapters.initialize(spmd=True)
    loop = Loop()
    # torch_xla makes a constant of a zero that is read before it is written, with SPMD or without.
    loop.model.rebound = xla_adapters.get_runtime().transfers.to_device(torch.zeros(()))
    with xla_adapters.count() as counts:
        for _ in range(STEPS):
            with xla_adapters.step(name="train"):
                loop.body()
    assert (counts.compiles, counts.executions) == (1, STEPS)
