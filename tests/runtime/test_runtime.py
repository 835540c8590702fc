"""Which runtime is used, what must come first, its mode, and a runtime without optional parts."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch_xla.debug.metrics as xla_metrics
import torch_xla.runtime as xr
from torch import nn

import xla_adapters
from tests.isolation import isolated, run_in_child
from tests.support import Loop
from xla_adapters import (
    CompiledStep,
    ConfigError,
    RuntimeOrderError,
    UnsupportedOptionError,
    XLAConfig,
    get_runtime,
    runtime,
)
from xla_adapters.cpu.process_options import leave_out_slow_passes, leaves_out_slow_passes
from xla_adapters.runtime import Runtime, using_runtime
from xla_adapters.sharding import Sharder, ShardingConfig

# ---- which runtime --------------------------------------------------------------------------------


def _installed(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(runtime, "find_spec", lambda name: object() if name in names else None)


@pytest.mark.parametrize("name", ["torch_xla", "torch_tpu"])
def test_the_one_that_is_installed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    _installed(monkeypatch, name)
    assert runtime.installed_runtime() == name


def test_both_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, "torch_xla", "torch_tpu")
    with pytest.raises(ConfigError, match=r'initialize\(runtime="torch_tpu"\)'):
        runtime.installed_runtime()


def test_none_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch)
    with pytest.raises(ConfigError, match=r"xla-adapters\[torch-tpu\]"):
        runtime.installed_runtime()


def test_one_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, "torch_xla")
    with pytest.raises(ConfigError, match="torch_tpu is not installed"):
        runtime.make_runtime("torch_tpu")
    with pytest.raises(ConfigError, match="valid values: 'torch_xla', 'torch_tpu'"):
        runtime.make_runtime("jax")


# ---- the root logger ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        ("import torch_xla", 0),
        ("logging.basicConfig(); root.addHandler(logging.NullHandler())", 2),
    ],
)
def test_the_root_logger_has_no_handler_of_torch_xla(before: str, kept: int) -> None:
    program = f"""
import logging
root = logging.getLogger()
{before}
import xla_adapters
xla_adapters.initialize()
import torch_xla.core.xla_model as xm
xm.rendezvous("as accelerate calls it")
print(len(root.handlers))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [str(kept)], ran.stderr


# ---- what must come first -------------------------------------------------------------------------


@isolated
def test_a_host_backward_before_the_runtime_starts() -> None:
    torch.ones(2, requires_grad=True).sum().backward()
    with xla_adapters.eager():
        loop = Loop()
        with xla_adapters.count() as counters:
            for _ in range(2):
                with xla_adapters.step():
                    loop.body()
        assert (counters.compiles, counters.executions) == (1, 2)


@isolated(env={"CPU_NUM_DEVICES": "4"})
def test_spmd_after_the_device_was_used_is_refused() -> None:
    torch.ones(2).to("xla")
    with pytest.raises(RuntimeOrderError, match=r"initialize\(spmd=True\)"):
        xla_adapters.initialize(spmd=True)


@isolated(env={"CPU_NUM_DEVICES": "4"})
def test_spmd_first() -> None:
    xla_adapters.initialize(spmd=True)
    xla_adapters.initialize(spmd=True)
    xla_adapters.initialize()
    assert xla_adapters.get_runtime().device.count() == 4
    assert xla_adapters.get_runtime().device.world_size() == 1
    with xla_adapters.eager():
        loop = Loop()
        with xla_adapters.count() as counters:
            for _ in range(3):
                with xla_adapters.step():
                    loop.body()
        # What the first step is given was uploaded without a sharding, what it returns has one: two graphs.
        assert (counters.compiles, counters.executions, counters.eager_ops) == (2, 3, 0)
        assert xla_metrics.metric_data("ExecuteReplicatedTime")[0] >= 3


@isolated(env={"XLA_DISABLE_FUNCTIONALIZATION": "1"})
def test_without_functionalization_nothing_can_be_undone() -> None:
    with pytest.raises(ConfigError, match="XLA_DISABLE_FUNCTIONALIZATION"), xla_adapters.step():
        pytest.fail("the step began")


# ---- fast compiles -----------------------------------------------------------------------------------


def _sum_of_rows(fast: bool) -> list[float]:
    xla_adapters.initialize(fast_compile=fast)
    xla_adapters.initialize(fast_compile=fast)
    return torch.linspace(0, 1, 4 * 512).view(4, 512).to("xla").sum(1).tolist()  # type: ignore[no-any-return]


def _compiled_sums(folder: Path, fast: bool) -> tuple[list[float], str]:
    """The sums of four rows, and what they were compiled to."""
    env = {"XLA_FLAGS": f"--xla_dump_to={folder} --xla_dump_hlo_as_text"}
    sums = run_in_child(functools.partial(_sum_of_rows, fast), env=env)
    return sums, "".join(file.read_text() for file in folder.glob("*after_optimizations.txt"))


def test_fast_compiles_leave_out_the_windows_of_sums(tmp_path: Path) -> None:
    (usual, trees), (fast, plain) = (_compiled_sums(tmp_path / str(fast), fast) for fast in (False, True))
    assert "reduce-window" in trees
    assert "reduce" in plain
    assert "reduce-window" not in plain
    assert fast == pytest.approx(usual, rel=1e-5)


@isolated
def test_fast_compiles_after_the_device_was_used_are_refused() -> None:
    torch.ones(2).to("xla")
    with pytest.raises(RuntimeOrderError, match=r"initialize\(fast_compile=True\)"):
        xla_adapters.initialize(fast_compile=True)


@isolated(env={"PJRT_DEVICE": "TPU"})
def test_fast_compiles_are_for_cpu_devices() -> None:
    with pytest.raises(ConfigError, match="this one is TPU"):
        xla_adapters.initialize(fast_compile=True)


@isolated
@pytest.mark.parametrize("how", ["blocks", "layers"])
def test_other_fast_compiles_are_refused(how: str) -> None:
    with pytest.raises(ConfigError, match=r"valid values: False, True\..*use True"):
        xla_adapters.initialize(fast_compile=how)  # type: ignore[arg-type]


def test_fast_compiles_keep_the_flags_that_are_set() -> None:
    environment = {"XLA_FLAGS": "--xla_disable_hlo_passes=cse --xla_backend_optimization_level=0"}
    assert not leaves_out_slow_passes(environment)
    leave_out_slow_passes(environment)
    first = dict(environment)
    leave_out_slow_passes(environment)
    assert environment == first
    assert leaves_out_slow_passes(environment)
    flags = environment["XLA_FLAGS"].split()
    assert flags[1] == "--xla_backend_optimization_level=0"
    assert flags[-1] == "--xla_disable_hlo_passes=cse,tree_reduction_rewriter"


@pytest.mark.parametrize("start", [xla_adapters.initialize, lambda: xla_adapters.step().__enter__()])
@isolated(env={"CPU_NUM_DEVICES": "8"})
def test_automatic_sharding_of_torch_xla_is_refused_by_name(start: Callable[[], object]) -> None:
    xr.use_spmd(auto=True)
    with pytest.raises(UnsupportedOptionError, match=r"auto_sharding=True.*distribute_module"):
        start()


# ---- the process is eager after initialize, and steps are compiled all the same -------------------


@isolated
def test_operations_execute_at_once_after_initialize() -> None:
    xla_adapters.initialize()
    tensor = torch.ones(3).to("xla")
    with xla_adapters.count() as counters:
        tensor = tensor + 1
    assert (counters.eager_ops, counters.executions) == (1, 0)
    with xla_adapters.count() as counters, xla_adapters.step():
        tensor = (tensor + 1) * 2
    assert (counters.eager_ops, counters.executions) == (0, 1)
    assert xla_adapters.get_runtime().tracing.eager()
    assert tensor.tolist() == [6, 6, 6]


@isolated
def test_the_mode_is_left_as_it_is_if_asked() -> None:
    xla_adapters.initialize(eager=False)
    tensor = torch.ones(3).to("xla")
    with xla_adapters.count() as counters:
        tensor = tensor + 1
    assert counters.eager_ops == 0
    xla_adapters.initialize()
    xla_adapters.initialize(eager=False)
    assert xla_adapters.get_runtime().tracing.eager()


# ---- a runtime without the optional parts of the interface ----------------------------------------


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
