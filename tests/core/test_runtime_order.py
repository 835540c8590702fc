"""What must come first: the runtime, SPMD, functionalization."""

from __future__ import annotations

import pytest
import torch
import torch_xla.debug.metrics as xla_metrics

import xla_adapters
from tests.core.support import Loop
from tests.isolation import isolated
from xla_adapters import ConfigError, RuntimeOrderError


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
    assert xla_adapters.get_backend().device_count() == 4
    assert xla_adapters.get_backend().world_size() == 1
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
