"""The training tests on another platform than torch_xla's own CPU: a PJRT plugin, as GPUs and accelerators have.

The plugin computes on the CPU, too, so that the tests' expectations are the same.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping

import pytest

from tests.plugin_platform.build import ROOT, build

pytestmark = pytest.mark.slow

_IS_THE_DEVICE = "tests/plugin_platform/on_xcpu.py::test_it_is_the_device"
# Each way to train once: traced, replayed, accumulated, sharded. Left out are details that do not depend on the
# platform, and tests of what is for CPU devices alone: `fast_compile`, and the random algorithm that is chosen there
# (tests/cpu, tests/runtime/test_runtime.py, tests/runtime/test_rng.py).
SELECTED = {
    "core": (
        "tests/plugin_platform/on_xcpu.py",
        "tests/tracing/test_step_scope.py",
        "tests/replay/test_replay.py",
        "tests/sharding/test_distribute.py::test_recipes_and_planned",
    ),
    "hf_trainer": (
        _IS_THE_DEVICE,
        *(
            f"tests/hf_trainer/test_training.py::test_{name}"
            for name in (
                "plain_training_is_one_graph",
                "accumulation_per_micro_batch",
                "accumulation_unrolled",
                "clipping_bites",
                "bf16_computes_in_bfloat16_and_keeps_float32_parameters",
                "checkpointing_parity_with_cpu",
            )
        ),
        "tests/adapters/test_replay.py::test_one_graph_and_the_same_numbers[hf]",
        "tests/adapters/test_replay.py::test_under_spmd[dp-8-hf]",
        "tests/adapters/test_replay.py::test_under_spmd[fsdp-8-hf]",
    ),
    "lightning_strategy": (
        _IS_THE_DEVICE,
        *(
            f"tests/lightning_strategy/test_training.py::test_{name}"
            for name in (
                "automatic_optimization_is_one_graph",
                "accumulation_is_a_graph_per_phase",
                "accumulation_unrolled_is_one_graph_per_update",
                "clipping_is_part_of_the_graph",
                "tied_weights_stay_tied",
            )
        ),
        "tests/lightning_strategy/test_replay.py::test_everything_logged_with_a_schedule_and_dropout",
    ),
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler (cc, gcc, clang) to build the plugin's shim with")
    return build(compiler, tmp_path_factory.mktemp("xcpu"))


@pytest.mark.parametrize("group", ["core", "hf_trainer", pytest.param("lightning_strategy", marks=pytest.mark.long)])
def test_trains_on_a_plugin(group: str, environment: Mapping[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *SELECTED[group]]
    env = {**os.environ, **environment}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    # Nothing was skipped: then the line would say so.
    assert re.search(r"^\d+ passed(, \d+ deselected)? in ", done.stdout, re.MULTILINE), done.stdout[-2_000:]
