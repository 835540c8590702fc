"""What must come first: the runtime, SPMD, functionalization."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch_xla.debug.metrics as xla_metrics
import torch_xla.runtime as xr

import xla_adapters
from tests.isolation import isolated, run_in_child
from tests.support import Loop
from xla_adapters import ConfigError, RuntimeOrderError, UnsupportedOptionError
from xla_adapters.cpu.process.compiler_flags import leave_out_slow_passes, leaves_out_slow_passes


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
    for how in (True, "blocks"):
        with pytest.raises(ConfigError, match="this one is TPU"):
            xla_adapters.initialize(fast_compile=how)  # type: ignore[arg-type]


@isolated
def test_other_fast_compiles_are_named() -> None:
    with pytest.raises(ConfigError, match="there are False, True and 'blocks'"):
        xla_adapters.initialize(fast_compile="layers")  # type: ignore[arg-type]


@isolated
def test_blocks_can_be_asked_for_at_any_time() -> None:
    torch.ones(2).to("xla")
    flags = os.environ.get("XLA_FLAGS")
    xla_adapters.initialize(fast_compile="blocks")
    assert os.environ.get("XLA_FLAGS") == flags


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
