"""A runtime without the optional parts of the interface: what works, and what says why it does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import xla_adapters
from tests.isolation import isolated
from xla_adapters import CompiledStep, UnsupportedOptionError, XLAConfig, get_runtime
from xla_adapters.runtime import Runtime, using_runtime
from xla_adapters.sharding import Sharder, ShardingConfig


def _without_optional_parts() -> Runtime:
    full = get_runtime()
    return Runtime(
        name="a small runtime",
        dynamo_backend="none",
        device=full.device,
        transfers=full.transfers,
        tracing=full.tracing,
        values=full.values,
        executables=full.executables,
        random=full.random,
        counters=full.counters,
        why_no_replay=lambda runtime: pytest.fail("not asked without lazy tensors"),
    )


def _losses(calls: int) -> list[float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(get_runtime().device.torch_device())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

    def body(inputs: torch.Tensor) -> torch.Tensor:
        loss = net(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = CompiledStep(body, config=XLAConfig(step_replay="auto"))
    losses = [step(torch.full((2, 4), float(call))) for call in range(calls)]
    assert (step.replays > 0) is get_runtime().has_lazy_tensors
    return [float(loss) for loss in losses]


@isolated
def test_steps_are_traced_and_the_reason_is_said_once() -> None:
    expected = _losses(5)
    with using_runtime(_without_optional_parts()), pytest.warns(UserWarning, match="no lazy tensors") as caught:
        found = _losses(5)
    assert len([warning for warning in caught if "traced again at each call" in str(warning.message)]) == 1
    assert found == pytest.approx(expected, rel=1e-6)


@isolated
def test_a_step_that_fails_is_undone() -> None:
    with using_runtime(_without_optional_parts()):
        weight = nn.Parameter(torch.ones(3, device=get_runtime().device.torch_device()))
        with pytest.raises(ZeroDivisionError), xla_adapters.step(), torch.no_grad():
            weight.mul_(2)
            raise ZeroDivisionError
        assert weight.tolist() == [1.0, 1.0, 1.0]


_PARTS: dict[str, Callable[[Runtime], object]] = {
    "SPMD": lambda runtime: runtime.spmd,
    "lazy tensors": lambda runtime: runtime.lazy,
    "share buffers": lambda runtime: runtime.shared_buffers,
    "computations of one's own": lambda runtime: runtime.custom_kernels,
}


@pytest.mark.parametrize("what", _PARTS)
def test_an_absent_part_is_named(what: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=f"a small runtime does not have .*{what}"):
        _PARTS[what](_without_optional_parts())


@isolated(env={"CPU_NUM_DEVICES": "2"})
def test_sharding_says_that_the_runtime_has_no_spmd() -> None:
    xla_adapters.initialize(spmd=True)
    with using_runtime(_without_optional_parts()), pytest.raises(UnsupportedOptionError, match="which sharding needs"):
        Sharder(ShardingConfig(scheme="fsdp")).prepare(nn.Linear(4, 4), lambda: torch.ones(2, 4))
