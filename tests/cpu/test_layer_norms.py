"""The input of a layer norm is computed once, where XLA would compute it again in all that reads it."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

import pytest
import torch
import torch_xla
from torch import nn

import xla_adapters
from tests.isolation import isolated, run_in_child
from xla_adapters import CompiledStep, XLAConfig, get_runtime
from xla_adapters.cpu import TUNING
from xla_adapters.cpu.process.compiler_flags import (
    keep_barriers,
    keep_no_barriers,
    keeps_barriers,
    leave_out_slow_passes,
    leaves_out_slow_passes,
)

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


@pytest.mark.slow
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
def test_not_where_a_graph_is_compiled_in_blocks() -> None:
    xla_adapters.initialize(fast_compile="blocks")
    assert _FLAG not in os.environ["XLA_FLAGS"].split()
    assert not TUNING.fuses_up_to_barriers(get_runtime().device)


@isolated(env={"XLA_FLAGS": "", "CPU_NUM_DEVICES": "2"})
def test_not_on_several_devices() -> None:
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
