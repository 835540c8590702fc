"""Sums as products and layer norms behind barriers, on one CPU device."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_xla
from torch import nn
from torch.library import Library
from torch.overrides import TorchFunctionMode

import xla_adapters
from tests.isolation import isolated, run_in_child
from xla_adapters import CompiledStep, XLAConfig, get_runtime
from xla_adapters.cpu import TUNING
from xla_adapters.cpu.process_options import (
    keep_barriers,
    keep_no_barriers,
    keeps_barriers,
    leave_out_slow_passes,
    leaves_out_slow_passes,
)

# ---- sums -----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("name", [*_BY_PRODUCT, *_BY_TORCH])
def test_sums_by_a_product_or_as_torch_xla_sums(name: str) -> None:
    run_in_child(functools.partial(_summed, *{**_BY_PRODUCT, **_BY_TORCH}[name], name in _BY_PRODUCT))


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


# ---- layer norms ----------------------------------------------------------------------------------


WIDTH = 16
_FLAG = "--xla_disable_hlo_passes=cse_barrier_expander"


class _Layer(nn.Module):
    """What a transformer of the first kind has twice in a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden + torch.nn.functional.gelu(self.inner(hidden)))  # type: ignore[no-any-return]


def _train(layers: int, steps: int = 1, *, replay: bool | str = "auto") -> tuple[list[float], list[torch.Tensor]]:
    """Losses, and what the parameters are then."""
    xla_adapters.initialize()
    torch.manual_seed(1)
    model = nn.Sequential(*(_Layer() for _ in range(layers))).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    inputs, wanted = torch.randn(2, 4, 8, WIDTH).to("xla")

    def train(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch), wanted)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = CompiledStep(train, config=XLAConfig(step_replay=replay))
    losses = [step(inputs) for _ in range(steps)]
    return [float(loss) for loss in losses], [parameter.detach().cpu() for parameter in model.parameters()]


# ---- what XLA makes of it ----------------------------------------------------------------------------------


def _instructions(layers: int, folder: Path, *, once: bool) -> int:
    """Of the largest graph that is compiled, with all that is fused."""
    dump = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
    if not once:
        # Somebody else leaves another pass out.
        dump += " --xla_disable_hlo_passes=no-such-pass"
    run_in_child(functools.partial(_train, layers, replay=False), env={"XLA_FLAGS": dump})
    texts = [path.read_text() for path in folder.glob("*after_optimizations.txt")]
    return max(text.count(" = ") for text in texts)


@pytest.mark.long
def test_a_graph_grows_with_its_layers_and_not_with_their_square(tmp_path: Path) -> None:
    found = {}
    for once in (True, False):
        for layers in (6, 18):
            folder = tmp_path / f"{layers}-{once}"
            folder.mkdir()
            found[layers, once] = _instructions(layers, folder, once=once)
    # Some is there but once, whatever the number of layers.
    assert found[18, True] < 3.1 * found[6, True]
    assert found[18, False] > 4.5 * found[6, False]


# ---- what it computes --------------------------------------------------------------------------------------


def _train_with(flags: str, replay: bool | str) -> tuple[list[float], list[torch.Tensor]]:
    os.environ["XLA_FLAGS"] = flags
    found = _train(6, 6, replay=replay)
    assert TUNING.fuses_up_to_barriers(get_runtime().device) is (not flags)
    return found


@pytest.mark.slow
def test_the_same_training() -> None:
    traced, replayed = (run_in_child(functools.partial(_train_with, "", replay)) for replay in (False, True))
    assert traced[0] == replayed[0]
    for one, other in zip(traced[1], replayed[1], strict=True):
        assert torch.equal(one, other)
    stock = run_in_child(functools.partial(_train_with, "--xla_disable_hlo_passes=no-such-pass", False))
    assert traced[0] == pytest.approx(stock[0], rel=1e-5)
    assert traced[0][-1] < traced[0][0]


@isolated
def test_what_is_there_stays_what_it_is() -> None:
    """A value that is an input of the step is not computed, and one that functorch wraps has none of its own."""
    xla_adapters.initialize()
    assert TUNING.fuses_up_to_barriers(get_runtime().device)
    norm, inputs, leaf = nn.LayerNorm(WIDTH).to("xla"), torch.randn(3, 4, WIDTH), torch.randn(4, WIDTH)
    there, leaf_there = inputs.to("xla"), leaf.to("xla").requires_grad_()
    with xla_adapters.step():
        results = [norm(there), norm(leaf_there), torch.func.vmap(norm)(there)]
        assert not get_runtime().tracing.is_pending(there)
        assert not get_runtime().tracing.is_pending(leaf_there)
        assert "opt-barrier" not in torch_xla._XLAC._get_xla_tensors_hlo(results)
        results.append(torch.layer_norm(there + 1, (WIDTH,)))
        assert "opt-barrier" in torch_xla._XLAC._get_xla_tensors_hlo(results)
    assert leaf_there._backward_hooks is None
    plain = nn.LayerNorm(WIDTH)
    expected = [plain(inputs), plain(leaf), plain(inputs), plain(inputs + 1)]
    for result, value in zip(results, expected, strict=True):
        torch.testing.assert_close(result.detach().cpu(), value.detach(), rtol=1e-5, atol=1e-5)


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(context: object, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(context: object, *gradients: torch.Tensor) -> None:
        return None


@isolated
def test_no_gradient() -> None:
    """Autograd calls hooks without one where nothing comes back."""
    xla_adapters.initialize()
    inputs = torch.randn(4, 2 * WIDTH)

    def gradient(start: torch.Tensor) -> torch.Tensor:
        hidden = start.requires_grad_() * 2
        normed, other = hidden.chunk(2, -1)
        torch.nn.functional.layer_norm(normed, (WIDTH,))
        nothing = _NoGradient.apply(torch.nn.functional.layer_norm(hidden, (2 * WIDTH,)))  # type: ignore[no-untyped-call]
        (found,) = torch.autograd.grad(other.square().sum() + nothing.sum(), start)
        return found

    there = inputs.to("xla")
    with xla_adapters.step():
        found = gradient(there)
    torch.testing.assert_close(found.cpu(), gradient(inputs))


@isolated
def test_gradients_of_gradients() -> None:
    xla_adapters.initialize()
    inputs = torch.randn(4, WIDTH)

    def second(start: torch.Tensor) -> torch.Tensor:
        value = start.requires_grad_() * 2
        (first,) = torch.autograd.grad(
            torch.nn.functional.layer_norm(value, (WIDTH,)).pow(3).sum(), start, create_graph=True
        )
        (found,) = torch.autograd.grad(first.square().sum(), start)
        return found

    there = inputs.to("xla")
    with xla_adapters.step():
        found = second(there)
    torch.testing.assert_close(found.cpu(), second(inputs), rtol=1e-3, atol=1e-3)


# ---- where ---------------------------------------------------------------------------------------------------


@isolated(env={"XLA_FLAGS": ""})
@pytest.mark.parametrize("prepared", [False, True])
def test_it_is_said(caplog: pytest.LogCaptureFixture, prepared: bool) -> None:
    if prepared:
        # As `import hf_trainer` does, before anybody has a log.
        xla_adapters.runtime.prepare()
        assert _FLAG in os.environ["XLA_FLAGS"].split()
    with caplog.at_level(logging.INFO, "xla_adapters"):
        xla_adapters.initialize()
    assert _FLAG in os.environ["XLA_FLAGS"].split()
    assert [record for record in caplog.records if _FLAG in record.getMessage()]


@isolated(env={"XLA_FLAGS": ""})
def test_where_slow_passes_are_left_out_too() -> None:
    xla_adapters.initialize(fast_compile=True)
    # XLA takes the last one of those that set an option.
    option = _FLAG.partition("=")[0]
    given = [flag for flag in os.environ["XLA_FLAGS"].split() if flag.partition("=")[0] == option]
    assert given[-1] == f"{_FLAG},tree_reduction_rewriter"
    assert TUNING.fuses_up_to_barriers(get_runtime().device)


@isolated(env={"XLA_FLAGS": "", "CPU_NUM_DEVICES": "2"})
def test_not_on_several_devices_norms() -> None:
    xla_adapters.initialize(spmd=True)
    assert _FLAG not in os.environ["XLA_FLAGS"].split()
    assert not TUNING.fuses_up_to_barriers(get_runtime().device)


@pytest.mark.parametrize("before", ["", "--xla_backend_optimization_level=0"])
def test_it_is_said_once_and_can_be_taken_back(before: str) -> None:
    environment = {"XLA_FLAGS": before}
    assert keep_barriers(environment)
    assert environment["XLA_FLAGS"].split() == [*before.split(), _FLAG]
    assert keeps_barriers(environment)
    assert not keep_barriers(environment)
    keep_no_barriers(environment)
    assert environment["XLA_FLAGS"] == before


def test_only_what_was_said_is_taken_back() -> None:
    environment = {"XLA_FLAGS": "--xla_disable_hlo_passes=cse_barrier_expander,cse"}
    keep_no_barriers(environment)
    assert environment == {"XLA_FLAGS": "--xla_disable_hlo_passes=cse_barrier_expander,cse"}


@pytest.mark.parametrize("passes", ["cse", ""])
def test_what_the_user_leaves_out_stands(passes: str) -> None:
    environment = {"XLA_FLAGS": f"--xla_disable_hlo_passes={passes}"}
    assert not keep_barriers(environment)
    assert environment == {"XLA_FLAGS": f"--xla_disable_hlo_passes={passes}"}
    assert not keeps_barriers(environment)


def test_fast_compiles_are_said_beside_it() -> None:
    environment = {"XLA_FLAGS": ""}
    keep_barriers(environment)
    leave_out_slow_passes(environment)
    assert keeps_barriers(environment)
    assert leaves_out_slow_passes(environment)
