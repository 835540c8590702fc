"""Activation checkpointing on the device: the same gradients, less memory, nothing left behind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import xla_adapters
from tests.device import DEVICE
from tests.isolation import isolated, run_in_child
from xla_adapters import CompiledStep, StepSeed, XLAConfig, get_runtime
from xla_adapters.sharding.hlo_text import read_memory_report
from xla_adapters.tracing.activation_checkpointing import checkpoint

_VARIANTS = pytest.mark.parametrize("reentrant", [False, True])
WIDTH = 32


class Block(nn.Module):
    """Wide inside, narrow outside: what checkpointing is for."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, hidden: torch.Tensor, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
        inner = functional.gelu(self.wide(self.norm(hidden))) * scale
        if self.dropout:
            inner = functional.dropout(inner, self.dropout)
        return hidden + self.narrow(inner)


class Blocks(nn.Module):
    """Some of them in a row, each computed by `run`."""

    def __init__(self, count: int, run: Callable[..., Any] | None, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(**options) for _ in range(count))
        self.run = run

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden) if self.run is None else self.run(block, hidden)
        return hidden


def _run(reentrant: bool | None) -> Callable[..., Any] | None:
    return None if reentrant is None else functools.partial(checkpoint, use_reentrant=reentrant)


def _gradients(
    run: Callable[..., Any] | None, *, needs_gradient: bool = True, seed: int = 1, **options: Any
) -> dict[str, torch.Tensor]:
    """Of three blocks after one traced step, on the host."""
    xla_adapters.initialize()
    torch.manual_seed(0)
    model = Blocks(3, run, **options)
    inputs = torch.randn(8, WIDTH).to(DEVICE).requires_grad_(needs_gradient)
    model.to(DEVICE)
    config = XLAConfig(on_graph_break="error")
    with xla_adapters.step(seed=StepSeed(seed=seed, step=0), config=config):
        loss = model(inputs).square().mean()
        loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()} | {"inputs": inputs.grad}
    return {"loss": loss.detach().cpu()} | {name: grad.cpu() for name, grad in found.items() if grad is not None}


def _assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


# ---- gradients -------------------------------------------------------------------------------------------


@isolated
@_VARIANTS
def test_the_same_gradients(reentrant: bool) -> None:
    _assert_same(_gradients(_run(reentrant)), _gradients(None))


@isolated
def test_inputs_that_need_no_gradient() -> None:
    """The reentrant variant gives no gradient to anything inside then, here as in torch."""
    expected = _gradients(None, needs_gradient=False)
    assert len(expected) == 1 + 3 * 6
    _assert_same(_gradients(_run(False), needs_gradient=False), expected)
    _assert_same(_gradients(checkpoint, needs_gradient=False), expected)
    with pytest.raises(RuntimeError, match="does not require grad"):
        _gradients(_run(True), needs_gradient=False)


@pytest.mark.parametrize("algorithm", ["three_fry", "default"])
@_VARIANTS
def test_the_same_dropout_masks(reentrant: bool, algorithm: str) -> None:
    def compare() -> None:
        plain, other = _gradients(None, dropout=0.5), _gradients(None, dropout=0.5, seed=2)
        assert get_runtime().random.algorithm() == algorithm
        assert not torch.equal(plain["loss"], other["loss"])
        _assert_same(_gradients(_run(reentrant), dropout=0.5), plain)

    run_in_child(compare, env={"XLA_RNG_BIT_GENERATOR": algorithm})


@isolated
@_VARIANTS
def test_what_is_drawn_behind_a_recomputation_goes_on(reentrant: bool) -> None:
    def drawn(run: Callable[..., Any]) -> list[torch.Tensor]:
        xla_adapters.initialize()
        inputs = torch.ones(64, device=DEVICE).requires_grad_()
        with xla_adapters.step(seed=StepSeed(seed=3, step=0)):
            run(lambda value: functional.dropout(value, 0.5).square(), inputs).sum().backward()
            behind = [torch.rand(4, device=DEVICE) for _ in range(2)]
        return [value.cpu() for value in behind]

    plain, found = (drawn(run) for run in (lambda function, value: function(value), _run(reentrant)))
    assert not torch.equal(*found)
    assert all(map(torch.equal, plain, found))


@isolated
def test_without_the_random_stream_other_masks_are_drawn() -> None:
    xla_adapters.initialize()
    inputs = torch.ones(256, device=DEVICE).requires_grad_()
    with xla_adapters.step(seed=StepSeed(seed=3, step=0)):
        result = checkpoint(lambda value: functional.dropout(value, 0.5).square(), inputs, preserve_rng_state=False)
        result.sum().backward()
    assert inputs.grad is not None
    assert not torch.equal(result.detach().cpu() != 0, inputs.grad.cpu() != 0)


@isolated
@_VARIANTS
def test_autocast_is_that_of_the_forward(reentrant: bool) -> None:
    def gradients(run: Callable[..., Any]) -> torch.Tensor:
        xla_adapters.initialize()
        torch.manual_seed(0)
        block, inputs = Block().to(DEVICE), torch.randn(8, WIDTH).to(DEVICE).requires_grad_()
        with xla_adapters.step():
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                loss = run(block, inputs).float().square().mean()
            loss.backward()
        assert block.wide.weight.grad is not None
        return block.wide.weight.grad.cpu()

    plain, found = (gradients(run) for run in (lambda block, value: block(value), _run(reentrant)))
    assert torch.equal(plain, found)


@isolated
def test_inputs_of_every_kind() -> None:
    """Bound, by name, nested, not tensors; one that only the function's closure has."""
    xla_adapters.initialize()

    def gradients(run: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        values = [torch.randn(4, 4).to(DEVICE).requires_grad_() for _ in range(5)]
        one, bound, named, nested, closed = values

        def function(
            bound: torch.Tensor, value: torch.Tensor, *, factor: float, named: torch.Tensor, nested: Any
        ) -> tuple[Any, ...]:
            result = (bound.sin() * value.cos() * named.exp() * nested["here"][0].tanh() * closed.sin()).square()
            return result * factor, {"second": result.exp()}, "no tensor", factor

        with xla_adapters.step(config=XLAConfig(on_graph_break="error")):
            call = functools.partial(function, bound, nested={"here": (nested, None)})
            first, second, text, factor = run(call, one, factor=2.0, named=named)
            assert (text, factor) == ("no tensor", 2.0)
            (first.sum() + second["second"].sum()).backward()
        assert all(value.grad is not None for value in values)
        return [value.grad.cpu() for value in values if value.grad is not None]

    plain = gradients(lambda function, *args, **kwargs: function(*args, **kwargs))
    for mine, expected in zip(gradients(checkpoint), plain, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


@isolated
def test_a_gradient_of_some_outputs_only() -> None:
    xla_adapters.initialize()

    def gradient(run: Callable[..., Any]) -> torch.Tensor:
        value = torch.linspace(0, 1, 8).to(DEVICE).requires_grad_()
        with xla_adapters.step():
            used, _, same = run(lambda value: (value.sin().square(), value.exp().square(), value), value)
            (used.sum() + same.detach().sum()).backward()
        assert value.grad is not None
        assert not value._backward_hooks
        return value.grad.cpu()

    torch.testing.assert_close(gradient(checkpoint), gradient(lambda function, value: function(value)))


@isolated
def test_backward_twice_and_gradients_of_gradients() -> None:
    xla_adapters.initialize()

    def gradients(run: Callable[..., Any]) -> list[torch.Tensor]:
        value = torch.linspace(0.1, 1, 8).to(DEVICE).requires_grad_()
        with xla_adapters.step():
            result = run(lambda value: value.sin().pow(3), value).sum()
            result.backward(retain_graph=True)
            result.backward(retain_graph=True)
            assert value.grad is not None
            (first,) = torch.autograd.grad(result, value, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), value)
        return [value.grad.cpu(), first.detach().cpu(), second.cpu()]

    plain = gradients(lambda function, value: function(value))
    for mine, expected in zip(gradients(checkpoint), plain, strict=True):
        torch.testing.assert_close(mine, expected)


@isolated
@_VARIANTS
def test_one_inside_the_other(reentrant: bool) -> None:
    run = _run(reentrant)
    assert run is not None

    def nested(block: nn.Module, hidden: torch.Tensor) -> Any:
        return run(lambda value: run(block, run(block, value)), hidden)

    _assert_same(_gradients(nested, dropout=0.5), _gradients(lambda block, hidden: block(block(hidden)), dropout=0.5))


@isolated
def test_nothing_is_recomputed_where_no_gradient_is_asked_for() -> None:
    xla_adapters.initialize()
    block, calls = Block().to(DEVICE), []
    block.register_forward_pre_hook(lambda *args: calls.append(1))
    with xla_adapters.step(), torch.no_grad():
        result = checkpoint(block, torch.ones(2, WIDTH, device=DEVICE))
    assert not result.requires_grad
    assert len(calls) == 1
    assert result._backward_hooks is None


# ---- where -----------------------------------------------------------------------------------------------


@isolated
@pytest.mark.parametrize("eager", [False, True])
@_VARIANTS
def test_outside_of_steps(reentrant: bool, eager: bool) -> None:
    """In loops that execute what is pending whenever they like, or each operation at once."""
    xla_adapters.initialize()
    get_runtime().tracing.set_eager(eager)

    def gradient(run: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        block, inputs = Block(dropout=0.5).to(DEVICE), torch.randn(8, WIDTH).to(DEVICE).requires_grad_()
        get_runtime().random.set_seed(5)
        run(block, inputs).square().mean().backward()
        return [parameter.grad.cpu() for parameter in block.parameters() if parameter.grad is not None]

    plain = gradient(lambda block, value: block(value))
    assert len(plain) == 6
    for mine, expected in zip(gradient(_run(reentrant)), plain, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


@isolated
def test_tensors_of_the_host_are_torchs() -> None:
    value = torch.ones(4, requires_grad=True)
    calls: list[int] = []

    def function(value: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return value.sin().exp()

    checkpoint(function, value).sum().backward()
    assert len(calls) == 2
    assert not get_runtime().device.started()


@isolated
@_VARIANTS
def test_one_graph_without_reads(reentrant: bool) -> None:
    xla_adapters.initialize()
    torch.manual_seed(0)
    model = Blocks(2, _run(reentrant), dropout=0.5).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch.requires_grad_()).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = CompiledStep(train, config=XLAConfig(on_graph_break="error"))
    batches = [torch.randn(4, WIDTH).to(DEVICE) for _ in range(4)]
    step(batches[0])
    with xla_adapters.count() as counts:
        for batch in batches[1:]:
            step(batch)
    assert (counts.compiles, counts.executions, counts.transfers_to_host, counts.eager_ops) == (0, 3, 0, 0)


@isolated
@_VARIANTS
def test_an_error_inside_leaves_no_hook(reentrant: bool) -> None:
    xla_adapters.initialize()
    value = torch.ones(4).to(DEVICE).requires_grad_()
    infer = torch.utils.checkpoint._infer_device_type

    def function(inputs: torch.Tensor) -> torch.Tensor:
        inputs = inputs.sin()
        raise KeyError("inside")

    with pytest.raises(KeyError) as caught, xla_adapters.step():
        checkpoint(function, value, use_reentrant=reentrant)
    # The traceback is still there, and with it every frame.
    assert caught.tb is not None
    assert torch.utils.checkpoint._infer_device_type is infer
    saved = torch.ones(3, requires_grad=True)
    squared = saved.square()
    assert squared.grad_fn._saved_self is saved  # type: ignore[union-attr]
    with xla_adapters.step():
        checkpoint(torch.sin, value, use_reentrant=reentrant).sum().backward()
    torch.testing.assert_close(value.grad.cpu(), torch.ones(4).cos())  # type: ignore[union-attr]


@isolated
def test_options_that_the_reentrant_variant_does_not_have() -> None:
    xla_adapters.initialize()
    value = torch.ones(2).to(DEVICE).requires_grad_()
    with pytest.raises(ValueError, match="only with use_reentrant=False"):
        checkpoint(lambda value, other: value, value, use_reentrant=True, other=1)
    with pytest.raises(ValueError, match="only with use_reentrant=False"):
        checkpoint(torch.sin, value, use_reentrant=True, debug=True)


@isolated
def test_a_recomputation_that_differs_is_reported() -> None:
    xla_adapters.initialize()
    value, calls = torch.ones(4).to(DEVICE).requires_grad_(), []

    def function(inputs: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return (inputs[: 5 - len(calls)].sin() * 2).square().sum()

    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="different metadata"), xla_adapters.step():
        checkpoint(function, value).backward()


# ---- memory ----------------------------------------------------------------------------------------------


def _train_once(reentrant: bool | None) -> None:
    xla_adapters.initialize()
    model = Blocks(8, _run(reentrant)).to(DEVICE)
    inputs = torch.randn(512, WIDTH).to(DEVICE).requires_grad_()
    with xla_adapters.step():
        model(inputs).square().mean().backward()


def _temporaries(reentrant: bool | None, folder: Path) -> int:
    """Bytes of temporary values in the largest graph that is compiled."""
    folder.mkdir()
    flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
    run_in_child(functools.partial(_train_once, reentrant), env={"XLA_FLAGS": flags})
    reports = [read_memory_report(path.read_text()) for path in folder.glob("*buffer-assignment.txt")]
    return max(report.temporaries for report in reports)


def test_memory_falls(tmp_path: Path) -> None:
    kept = _temporaries(None, tmp_path / "kept")
    # Of each block about 14 widths of activations, of which checkpointing leaves one or two.
    for reentrant in (False, True):
        assert _temporaries(reentrant, tmp_path / f"{reentrant}") < 0.3 * kept


# ---- torch's own function ----------------------------------------------------------------------------------


def _sequentially(model: Blocks, hidden: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.utils.checkpoint.checkpoint_sequential(
        list(model.blocks), 2, hidden, use_reentrant=False
    )
    return result


@isolated
@pytest.mark.parametrize("mode", ["eager+compile", "eager", "lazy"])
@_VARIANTS
def test_torchs_function_by_any_name(reentrant: bool, mode: str) -> None:
    """Bound before the step, as `from torch.utils.checkpoint import checkpoint` and `functools.partial` do."""
    xla_adapters.initialize()
    runs = {
        "plain": None,
        "by name": functools.partial(torch_checkpoint, use_reentrant=reentrant),
        "sequential": None,
    }
    gradients: dict[str, list[torch.Tensor]] = {}
    for name, run in runs.items():
        torch.manual_seed(0)
        model = Blocks(3, run).to(DEVICE)
        inputs = torch.randn(8, WIDTH).to(DEVICE).requires_grad_()
        with xla_adapters.step(config=XLAConfig(xla_mode=mode)):
            result = _sequentially(model, inputs) if name == "sequential" else model(inputs)
            result.square().mean().backward()
        gradients[name] = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
        assert len(gradients[name]) == 3 * 6
    for name in ("by name", "sequential"):
        for actual, expected in zip(gradients[name], gradients["plain"], strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    # Undone behind the step.
    on_cpu = torch.ones(2, requires_grad=True)
    torch_checkpoint(torch.square, on_cpu, use_reentrant=reentrant).sum().backward()
    assert on_cpu.grad is not None


@isolated
def test_a_step_that_checkpoints_is_replayed() -> None:
    xla_adapters.initialize()
    torch.manual_seed(0)
    model = nn.ModuleList([Block(dropout=0.1), Block()]).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @CompiledStep
    def step(inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs
        for block in model:
            hidden = torch_checkpoint(block, hidden, use_reentrant=False)
        loss = hidden.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for _ in range(6):
        step(torch.ones(8, WIDTH, device=DEVICE))
    assert step.reasons == {}
    assert step.replays >= 3
