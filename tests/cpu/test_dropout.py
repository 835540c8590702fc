"""Dropout on CPU devices: what masks are drawn, what gradients they give, what they cost."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import xla_adapters
from tests.isolation import isolated, run_in_child
from xla_adapters import CompiledStep, StepSeed, XLAConfig, get_runtime
from xla_adapters.cpu.dropout import mask_computation
from xla_adapters.tracing.activation_checkpointing import checkpoint

_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)


def _threefry(first: int, second: int, counters: np.ndarray[Any, Any], number: int = 0) -> np.ndarray[Any, Any]:
    """The first words of Threefry-2x32-20, written after the paper's Random123 in numpy."""
    keys = [np.uint32(first), np.uint32(second), np.uint32(first ^ second ^ 0x1BD11BDA)]
    left = counters.astype(np.uint32) + keys[0]
    right = np.zeros_like(left) + np.uint32(number) + keys[1]
    for number in range(20):
        left = left + right
        by = np.uint32(_ROTATIONS[number % 8])
        right = ((right << by) | (right >> (np.uint32(32) - by))) ^ left
        if number % 4 == 3:
            injection = number // 4 + 1
            left = left + keys[injection % 3]
            right = right + keys[(injection + 1) % 3] + np.uint32(injection)
    return left


def _in_step(function: Any, *, seed: int = 1, step: int = 0, **config: Any) -> Any:
    xla_adapters.initialize()
    with xla_adapters.step(seed=StepSeed(seed=seed, step=step), config=XLAConfig(**config) if config else None):
        result = function()
    return result


def test_numpy_draws_what_the_paper_prints() -> None:
    # Of Random123's kat_vectors, threefry2x32 with 20 rounds and a counter of zeros.
    assert _threefry(0, 0, np.zeros(1, np.uint32)) == [0x6B200159]


@isolated
def test_a_mask_is_threefry_of_the_position() -> None:
    xla_adapters.initialize()
    first, second = 0xFFFFFFF0, 0x12345678
    for number in (0, 0xFFFFFFFF):
        words = torch.tensor([first, second, number]).to("xla").to(torch.uint32)
        mask, following = get_runtime().custom_kernels.call(mask_computation((3, 5, 7), 0.25), list(words))
        expected = _threefry(first, second, np.arange(105), number) < 2**30
        assert np.array_equal(mask.cpu().numpy().reshape(-1), expected)
        assert 0 < expected.sum() < 105
        assert following.to(torch.int64).item() == (number * 1664525 + 1013904223) % 2**32


@isolated
def test_what_is_kept_is_scaled_and_the_gradient_likewise() -> None:
    batch = torch.arange(1.0, 4097).reshape(64, 64).to("xla").requires_grad_()

    def body() -> tuple[torch.Tensor, ...]:
        dropped = functional.dropout(batch, 0.2)
        other = functional.dropout(batch, 0.2)
        (gradient,) = torch.autograd.grad(dropped.square().sum() / 2, batch)
        return dropped.detach(), other.detach(), gradient

    dropped, other, gradient = (tensor.cpu() for tensor in _in_step(body))
    again = [tensor.cpu() for tensor in _in_step(body)]
    later = [tensor.cpu() for tensor in _in_step(body, step=1)]
    kept, values = dropped != 0, torch.arange(1.0, 4097).reshape(64, 64)
    # The deviation of a share of 4,096 draws is 0.00625.
    assert abs(kept.float().mean() - 0.8) < 0.03
    torch.testing.assert_close(dropped, torch.where(kept, values * 1.25, 0.0))
    torch.testing.assert_close(gradient, dropped * 1.25)
    assert torch.equal(dropped, again[0])
    assert torch.equal(other, again[1])
    masks = [(tensor != 0).flatten() for tensor in (dropped, other, *later[:2])]
    for number, mask in enumerate(masks):
        for one in masks[:number]:
            # Of independent ones 0.8 * 0.8 + 0.2 * 0.2 agree, with a deviation of 0.0073.
            assert abs((mask == one).float().mean() - 0.68) < 0.04


@isolated
def test_the_masks_of_neighbours_are_independent() -> None:
    batch = torch.ones(256, 256).to("xla")
    mask = (_in_step(lambda: functional.dropout(batch, 0.5)).cpu() != 0).float() - 0.5
    for moved in (mask.roll(1, 0), mask.roll(1, 1), mask.roll((1, 1), (0, 1)), mask.roll(16, 1)):
        # The mean of 65,536 products of 0.25 or -0.25.
        assert abs((mask * moved).mean()) < 0.25 * 5 / 256


@isolated
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_computes_again_with_the_same_masks(reentrant: bool) -> None:
    batch = torch.linspace(1, 2, 512).to("xla").requires_grad_()

    def block(value: torch.Tensor) -> torch.Tensor:
        return functional.dropout(functional.dropout(value, 0.5).square(), 0.5)

    def body() -> tuple[torch.Tensor, ...]:
        before = functional.dropout(batch, 0.25)
        result = checkpoint(block, before, use_reentrant=reentrant)
        behind = functional.dropout(result, 0.25)
        behind.sum().backward()
        assert batch.grad is not None
        return behind.detach(), result.detach(), before.detach(), batch.grad

    behind, result, before, gradient = (tensor.cpu() for tensor in _in_step(body))
    # y = ((x * 4/3) * 2)**2 * 2 * 4/3 where all four masks keep, so that dy/dx = 2 * y / x.
    torch.testing.assert_close(gradient, 2 * behind / torch.linspace(1, 2, 512))
    assert 0 < (behind != 0).sum() < (result != 0).sum() < (before != 0).sum() < 512


@isolated
def test_who_sets_the_stream_draws_from_there() -> None:
    batch = torch.ones(512).to("xla")

    def body() -> tuple[torch.Tensor, ...]:
        free = functional.dropout(batch, 0.5)
        get_runtime().random.set_seed(7)
        return free, functional.dropout(batch, 0.5), functional.dropout(batch, 0.5)

    one, other = _in_step(body), _in_step(body, step=1)
    assert not torch.equal(one[0].cpu(), other[0].cpu())
    assert torch.equal(one[1].cpu(), other[1].cpu())
    assert torch.equal(one[2].cpu(), other[2].cpu())
    assert not torch.equal(one[1].cpu(), one[2].cpu())


@isolated
def test_other_draws_of_the_step_are_their_own() -> None:
    batch = torch.ones(512).to("xla")

    def body() -> tuple[torch.Tensor, ...]:
        first = torch.rand(4, device="xla")
        masks = functional.dropout(batch, 0.5), functional.dropout(batch, 0.5)
        return first, *masks, torch.rand(4, device="xla")

    drawn = [[tensor.cpu().tolist() for tensor in _in_step(body, step=step)] for step in (0, 1, 0)]
    assert drawn[0] == drawn[2]
    values = [tuple(value) for step in drawn[:2] for value in step]
    assert len(set(values)) == 8


@isolated
def test_attention_drops_weights() -> None:
    torch.manual_seed(0)
    query, key, factors = torch.randn(2, 3, 8, 4), torch.randn(2, 3, 8, 4), torch.randn(2, 3, 8, 8)
    hidden = torch.full((8, 8), -torch.inf).triu(1)

    def body() -> tuple[torch.Tensor, ...]:
        inputs = [tensor.to("xla").requires_grad_() for tensor in (query, key)]
        value = torch.eye(8).expand(2, 3, 8, 8).to("xla")
        dropped = functional.scaled_dot_product_attention(*inputs, value, dropout_p=0.5, is_causal=True)
        gradients = torch.autograd.grad((dropped * factors.to("xla")).sum(), inputs)
        return dropped.detach(), *gradients

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dropped, *gradients = (tensor.cpu() for tensor in _in_step(body))
    causal = torch.ones(8, 8, dtype=torch.bool).tril()
    assert 0.3 < (dropped != 0)[..., causal].float().mean() < 0.7
    inputs = [tensor.clone().requires_grad_() for tensor in (query, key)]
    weights = torch.softmax(inputs[0] @ inputs[1].transpose(-1, -2) / 2 + hidden, -1)
    expected = torch.where(dropped != 0, 2 * weights, 0.0)
    torch.testing.assert_close(dropped, expected)
    for one, other in zip(gradients, torch.autograd.grad((expected * factors).sum(), inputs), strict=True):
        torch.testing.assert_close(one, other)


@isolated
@pytest.mark.parametrize("boolean", [True, False])
def test_attention_with_a_mask_of_ones_own(boolean: bool) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 2, 4, 4), torch.randn(2, 2, 4, 4), torch.eye(4).expand(2, 2, 4, 4)
    seen = torch.rand(2, 1, 4, 4) < 0.7
    # A query that may look at nothing gets nothing.
    seen[0, 0, 0] = False
    mask = seen if boolean else torch.zeros(2, 1, 4, 4).masked_fill(~seen, -torch.inf)
    whole = functional.scaled_dot_product_attention(query, key, value, mask)

    def body() -> torch.Tensor:
        inputs = query.to("xla"), key.to("xla"), value.to("xla"), mask.to("xla")
        return functional.scaled_dot_product_attention(*inputs, dropout_p=0.5)

    dropped = _in_step(body).cpu()
    torch.testing.assert_close(dropped, torch.where(dropped != 0, 2 * whole, 0.0))
    assert 0 < (dropped != 0).sum() < (whole != 0).sum()


@isolated
def test_attention_of_grouped_heads() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 8, 4), torch.randn(2, 2, 8, 4), torch.eye(8).expand(2, 2, 8, 8)
    whole = functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    def body() -> torch.Tensor:
        inputs = query.to("xla"), key.to("xla"), value.to("xla")
        return functional.scaled_dot_product_attention(*inputs, dropout_p=0.5, enable_gqa=True)

    dropped = _in_step(body).cpu()
    torch.testing.assert_close(dropped, torch.where(dropped != 0, 2 * whole, 0.0))
    # No two heads have the same mask.
    assert len({tuple(mask.flatten().tolist()) for mask in (dropped != 0).reshape(8, 8, 8)}) == 8


@isolated
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_place_and_types(dtype: torch.dtype) -> None:
    weight = torch.ones(512, dtype=dtype).to("xla").requires_grad_()

    def body() -> tuple[torch.Tensor, ...]:
        value = weight * 1
        functional.dropout(value, 0.5, inplace=True)
        (gradient,) = torch.autograd.grad(value.sum(), weight)
        return value.detach(), torch.dropout(weight, 0.5, True).detach(), gradient

    value, plain, gradient = (tensor.cpu() for tensor in _in_step(body))
    for one in (value, plain, gradient):
        assert one.dtype is dtype
        assert sorted(set(one.tolist())) == [0, 2]
    assert torch.equal(value, gradient)
    assert not torch.equal(value, plain)


@isolated
def test_what_is_not_by_chance_is_torchs() -> None:
    batch = torch.ones(16).to("xla")

    def body() -> tuple[torch.Tensor, ...]:
        return (
            functional.dropout(batch, 1.0),
            functional.dropout(batch, 0.0),
            functional.dropout(batch, 0.5, training=False),
            functional.dropout(batch[:0], 0.5),
        )

    assert [tensor.cpu().tolist() for tensor in _in_step(body)] == [[0.0] * 16, [1.0] * 16, [1.0] * 16, []]
    with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
        _in_step(lambda: functional.dropout(batch, 1.5))


@isolated
@pytest.mark.parametrize("algorithm", ["three_fry", "philox", "default"])
def test_who_asks_for_another_generator_gets_it(algorithm: str) -> None:
    batch = torch.ones(64).to("xla")

    def body() -> bool:
        return b"dropout" in get_runtime().executables.text([functional.dropout(batch, 0.5)])

    assert _in_step(body, rng_algorithm=algorithm) == (algorithm == "three_fry")


@isolated
def test_replays_draw_what_traced_steps_draw() -> None:
    xla_adapters.initialize()
    assert get_runtime().replay_works
    batch = torch.ones(64).to("xla")
    drawn = {}
    for replayed in ("auto", False):
        passes = iter(range(9))
        step = CompiledStep(
            lambda batch: functional.dropout(functional.dropout(batch, 0.5), 0.5),
            config=XLAConfig(step_replay=replayed),  # type: ignore[arg-type]
            seed=lambda passes=passes: StepSeed(seed=1, step=next(passes)),  # type: ignore[misc]
        )
        with xla_adapters.count() as counters:
            drawn[replayed] = [tuple(step(batch).cpu().tolist()) for _ in range(6)]
        assert counters.executions == 6
        assert (step.program.replays > 0) == (replayed == "auto")
    assert drawn["auto"] == drawn[False]
    assert len(set(drawn[False])) == 6


def _steps_with(masks: int) -> float:
    batch = torch.ones(8, 512).to("xla")

    def body() -> torch.Tensor:
        dropped = batch
        for _ in range(masks):
            dropped = functional.dropout(dropped, 0.1)
        return dropped

    return float(_in_step(body).cpu().sum())


def test_masks_of_one_shape_are_drawn_by_one_kernel(tmp_path: Path) -> None:
    kernels = {}
    for masks in (2, 6):
        folder = tmp_path / str(masks)
        flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
        assert run_in_child(functools.partial(_steps_with, masks), env={"XLA_FLAGS": flags}) > 0
        kernels[masks] = [path.name for path in folder.glob("*.step.*compare*ir-no-opt.ll")]
    assert [len(names) for names in kernels.values()] == [1, 1], kernels
