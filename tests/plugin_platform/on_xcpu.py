"""What holds on a device that is not torch_xla's own CPU; `test_training.py` runs it on the platform "XCPU"."""

from __future__ import annotations

import os

import pytest
import torch

import xla_adapters
from tests.isolation import isolated
from xla_adapters import ConfigError, XLAConfig, get_runtime
from xla_adapters.cpu import TUNING
from xla_adapters.runtime import prepare
from xla_adapters.runtime.rng import use_random_algorithm


@isolated
def test_it_is_the_device() -> None:
    xla_adapters.initialize()
    assert get_runtime().device.hardware() == "XCPU"
    assert (torch.ones(2, device="xla") + 1).tolist() == [2, 2]


@isolated(env={"CPU_NUM_DEVICES": "4"})
def test_it_may_have_several_devices() -> None:
    xla_adapters.initialize(spmd=True)
    assert get_runtime().device.count() == 4


@isolated
def test_replay_works() -> None:
    xla_adapters.initialize()
    assert get_runtime().replay_works


@isolated
def test_the_memory_is_not_told() -> None:
    xla_adapters.initialize()
    assert get_runtime().device.memory_info() == {}


@isolated(env={"XLA_FLAGS": "--xla_backend_optimization_level=0"})
def test_the_tuning_for_cpu_devices_does_nothing() -> None:
    runtime = get_runtime()
    prepare()
    xla_adapters.initialize()
    assert os.environ["XLA_FLAGS"] == "--xla_backend_optimization_level=0"
    assert TUNING.lowerings(runtime) == {}
    assert TUNING.step_observer(runtime.device) is None
    with TUNING.around_step(runtime):
        assert torch.overrides._len_torch_function_stack() == 0
    assert TUNING.random_algorithm(runtime.device) is None
    assert use_random_algorithm(XLAConfig()) == "default"


@isolated
def test_what_is_for_cpu_devices_is_refused() -> None:
    with pytest.raises(ConfigError, match="is for CPU devices, and this one is XCPU"):
        xla_adapters.initialize(fast_compile=True)
    with pytest.raises(ConfigError, match="is for CPU devices, and this one is XCPU"):
        xla_adapters.initialize(keep_memory=True)
