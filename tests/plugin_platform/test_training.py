"""The training tests on another platform than torch_xla's own CPU: a PJRT plugin, as GPUs and accelerators have.

The plugin computes on the CPU, too, so that the tests' expectations are the same.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.plugin_platform.build import ROOT, build
from tests.plugin_platform.device import LIBRARY_VARIABLE

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


@pytest.mark.parametrize(
    "group",
    ["hf_trainer", *(pytest.param(name, marks=pytest.mark.long) for name in ("core", "lightning_strategy"))],
)
def test_trains_on_a_plugin(group: str, environment: Mapping[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *SELECTED[group]]
    env = {**os.environ, **environment}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    # Nothing was skipped: then the line would say so.
    assert re.search(r"^\d+ passed(, \d+ deselected)? in ", done.stdout, re.MULTILINE), done.stdout[-2_000:]


_TWICE = """
import json, torch, torch_xla, xla_adapters
xla_adapters.initialize()
model = torch.nn.Linear(4, 4).to("xla")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.nn.init.ones_(model.weight)

@xla_adapters.CompiledStep
def step(batch):
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

losses = [step(torch.ones(2, 4)).item() for _ in range(3)]
counts = xla_adapters.get_runtime().counters.compile_cache()
hardware = xla_adapters.get_runtime().device.hardware()
print(json.dumps([hardware, counts.compiled, counts.loaded, counts.problem]))
"""


@pytest.mark.parametrize("hardware", [pytest.param("XCPU", marks=pytest.mark.long), "TPU"])
def test_programs_are_kept_by_default(hardware: str, environment: Mapping[str, str], tmp_path: Path) -> None:
    """Of a registered plugin, and of libtpu, in whose place torch_xla gets the same one."""
    env = {**os.environ, **environment, "XDG_CACHE_HOME": str(tmp_path), "XLA_ADAPTERS_CACHE_DIR": ""}
    if hardware == "TPU":
        alone = {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-1"}
        bounds = {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_SKIP_MDS_QUERY": "1"}
        env |= {"PJRT_DEVICE": "TPU", "TPU_LIBRARY_PATH": environment[LIBRARY_VARIABLE], **alone, **bounds}
    command = [sys.executable, "-c", _TWICE]
    found = []
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-3_000:]
        found.append(json.loads(done.stdout.splitlines()[-1]))
    (_, compiled, loaded, _), again = found
    assert compiled > 0
    assert loaded == 0
    assert again == [hardware, 0, compiled, ""]
