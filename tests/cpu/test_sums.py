"""Sums over the rows of a matrix on CPU devices: which are products, what they come to, and where that ends."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch_xla
from torch.library import Library
from torch.overrides import TorchFunctionMode

import xla_adapters
from tests.isolation import isolated, run_in_child
from xla_adapters import CompiledStep, XLAConfig

_BY_PRODUCT: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "rows": ((40, 64), lambda value: value.sum(0)),
    "two dimensions": ((8, 5, 64), lambda value: value.sum((0, 1))),
    "two, in another order, counted from the end": ((8, 5, 64), lambda value: value.sum((-2, 0))),
    "kept": ((8, 5, 64), lambda value: value.sum((0, 1), keepdim=True)),
    "one of three": ((40, 8, 4), lambda value: value.sum(0, keepdim=True)),
    "typed": ((40, 64), lambda value: value.sum(0, dtype=torch.float32)),
    "turned": ((64, 40), lambda value: value.t().sum(0)),
    "as many as can be": ((1 << 16, 32), lambda value: value.sum(0)),
}
_BY_TORCH: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "columns": ((40, 64), lambda value: value.sum(1)),
    "all": ((40, 64), lambda value: value.sum()),
    "all, named": ((40, 64), lambda value: value.sum((0, 1))),
    "not the first ones": ((40, 8, 64), lambda value: value.sum((0, 2))),
    "few rows": ((32, 64), lambda value: value.sum(0)),
    "few columns": ((64, 31), lambda value: value.sum(0)),
    "very many rows": (((1 << 16) + 1, 32), lambda value: value.sum(0)),
    "in double precision": ((40, 64), lambda value: value.sum(0, dtype=torch.float64)),
    "of whole numbers": ((40, 64), lambda value: value.long().sum(0)),
    "in half precision": ((40, 64), lambda value: value.bfloat16().sum(0)),
    "of a single number": ((), lambda value: value.sum(0)),
}


def _has_products(tensors: Sequence[torch.Tensor]) -> bool:
    return " dot(" in torch_xla._XLAC._get_xla_tensors_hlo(list(tensors))


def _summed(shape: tuple[int, ...], function: Callable[[torch.Tensor], torch.Tensor], by_product: bool) -> None:
    xla_adapters.initialize()
    value = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected, there = function(value), value.to("xla")
    with xla_adapters.step():
        result = function(there)
        assert _has_products([result]) is by_product
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    # XLA adds up half precision in half precision.
    tolerance = 0.25 if expected.dtype == torch.bfloat16 else 1e-6 * value.numel() ** 0.5
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize("name", _BY_PRODUCT)
def test_by_a_product(name: str) -> None:
    run_in_child(functools.partial(_summed, *_BY_PRODUCT[name], True))


@pytest.mark.parametrize("name", _BY_TORCH)
def test_as_torch_xla_sums(name: str) -> None:
    run_in_child(functools.partial(_summed, *_BY_TORCH[name], False))


@isolated
def test_autograd_finds_it_for_biases_and_norms() -> None:
    xla_adapters.initialize()
    torch.manual_seed(1)
    inputs, factors = torch.randn(8, 8, 48), torch.randn(8, 8, 48)
    bias, norm = torch.nn.Parameter(torch.randn(48)), torch.nn.LayerNorm(48)

    def gradients() -> list[torch.Tensor]:
        # No products in it but those.
        ((norm(inputs) + bias) * factors).sin().sum().backward()
        return [parameter.grad for parameter in (bias, *norm.parameters()) if parameter.grad is not None]

    expected = gradients()
    inputs, factors, bias, norm = (
        inputs.to("xla"),
        factors.to("xla"),
        torch.nn.Parameter(bias.data.to("xla")),
        norm.to("xla"),
    )
    norm.zero_grad()
    with xla_adapters.step():
        actual = gradients()
        assert [_has_products([gradient]) for gradient in actual] == [True] * 3
    torch.testing.assert_close([gradient.cpu() for gradient in actual], expected, rtol=1e-5, atol=1e-5)


@isolated
@pytest.mark.parametrize("dims", [2, -3, (0, 0), (0, 2)])
def test_dimensions_that_do_not_exist(dims: Any) -> None:
    xla_adapters.initialize()
    value = torch.randn(40, 64).to("xla")
    with pytest.raises((IndexError, RuntimeError)):
        value.sum(dims)
    with pytest.raises((IndexError, RuntimeError)), xla_adapters.step():
        value.sum(dims)


@isolated
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_another_default_type(default: torch.dtype) -> None:
    xla_adapters.initialize()
    value = torch.randn(40, 64)
    there = value.to("xla")
    torch.set_default_dtype(default)
    with xla_adapters.step():
        result = there.sum(0)
        assert _has_products([result])
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.cpu(), value.sum(0), rtol=1e-5, atol=1e-5)


class _Calls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


@isolated
def test_who_looks_on_sees_the_sum_alone() -> None:
    xla_adapters.initialize()
    value = torch.randn(40, 64).to("xla")
    with xla_adapters.step(), _Calls() as calls:
        result = value.sum(0)
    assert calls.names == ["sum"]
    assert result.cpu().shape == (64,)


@isolated
def test_other_threads_are_in_no_step() -> None:
    xla_adapters.initialize()
    value, found = torch.randn(40, 64).to("xla"), []
    with xla_adapters.step():
        other = threading.Thread(target=lambda: found.append(_has_products([value.sum(0)])))
        other.start()
        other.join()
        found.append(_has_products([value.sum(0)]))
    assert found == [False, True]


@isolated
def test_a_kernel_of_the_users_stays() -> None:
    xla_adapters.initialize()
    library, value = Library("aten", "IMPL"), torch.randn(40, 64).to("xla")
    library.impl("sum.dim_IntList", lambda input, dim, keepdim=False, *, dtype=None: input[0] * 2, "XLA")
    for _ in range(2):
        with xla_adapters.step():
            result = value.sum(0)
        assert torch.equal(result.cpu(), value.cpu()[0] * 2)


@isolated
def test_torchs_own_sums_are_back_behind_a_step_however_it_ended() -> None:
    xla_adapters.initialize()
    value = torch.randn(40, 64).to("xla")
    with xla_adapters.step():
        assert _has_products([value.sum(0)])
    assert not _has_products([value.sum(0)])
    with pytest.raises(ZeroDivisionError), xla_adapters.step():
        assert _has_products([value.sum(0)])
        raise ZeroDivisionError
    assert not _has_products([value.sum(0)])


@isolated
def test_autocast_does_not_make_them_less_precise() -> None:
    xla_adapters.initialize()
    value = torch.randn(40, 64)
    there = value.to("xla")
    with xla_adapters.step(), torch.autocast("xla", torch.bfloat16):
        result = there.sum(0)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.cpu(), value.sum(0))


@isolated
def test_nothing_is_said_of_the_kernel_that_is_replaced(recwarn: pytest.WarningsRecorder) -> None:
    xla_adapters.initialize()
    value = torch.randn(40, 64).to("xla")
    with xla_adapters.step():
        result = value.sum(0)
    assert result.cpu().shape == (64,)
    assert not [str(warning.message) for warning in recwarn if "kernel" in str(warning.message)]


def _small_and_large() -> tuple[bool, bool]:
    small, large = torch.randn(512, 128).to("xla"), torch.randn(512, 256).to("xla")
    with xla_adapters.step():
        return _has_products([small.sum(0)]), _has_products([large.sum(0)])


@isolated
def test_compiled_fast_only_large_ones() -> None:
    xla_adapters.initialize(fast_compile=True)
    assert _small_and_large() == (False, True)


@isolated
def test_compiled_in_blocks_all() -> None:
    xla_adapters.initialize(fast_compile="blocks")
    assert _small_and_large() == (True, True)


@isolated(env={"CPU_NUM_DEVICES": "4"})
def test_not_on_several_devices() -> None:
    xla_adapters.initialize(spmd=True)
    value = torch.randn(40, 64).to("xla")
    with xla_adapters.step():
        assert not _has_products([value.sum(0)])


@isolated
def test_replays_sum_as_traced_steps_do() -> None:
    def losses(replayed: bool) -> list[Any]:
        torch.manual_seed(1)
        module = torch.nn.Linear(64, 48).to("xla")
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)

        def train(inputs: torch.Tensor) -> torch.Tensor:
            loss = module(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step = CompiledStep(train, config=XLAConfig(step_replay="auto" if replayed else False))
        batches = torch.randn(6, 40, 64, generator=torch.Generator().manual_seed(2))
        results = [step(batch.to("xla")).item() for batch in batches]
        assert (step.program.replays > 0) == replayed
        return results

    xla_adapters.initialize()
    assert losses(True) == losses(False)
