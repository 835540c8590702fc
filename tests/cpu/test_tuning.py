"""`XLA_ADAPTERS_CPU_TUNING=0`: a step is traced as on other devices, and nothing of the process is changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import json, os
import torch
import xla_adapters
from xla_adapters import CompiledStep, ConfigError, get_runtime
from xla_adapters.runtime import prepare
from xla_adapters.runtime.extensions import extensions

prepare()
messages = []
for options in ({"fast_compile": True}, {"keep_memory": True}):
    try:
        xla_adapters.initialize(**options)
    except ConfigError as error:
        messages.append(str(error))
xla_adapters.initialize(keep_memory=False)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Conv1d(3, 64, 3), torch.nn.LayerNorm(6), torch.nn.Dropout(0.0), torch.nn.Flatten(),
                            torch.nn.Linear(384, 4)).to("xla")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

def update(inputs, classes):
    loss = torch.nn.functional.cross_entropy(model(inputs), classes)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()

step = CompiledStep(update)
# It tries itself out by two tiny graphs.
assert get_runtime().replay_works
batches = [(torch.randn(40, 3, 8), torch.randint(0, 4, (40,))) for _ in range(6)]
with xla_adapters.count() as counts:
    losses = [step(*batch) for batch in batches]
    get_runtime().device.wait()
print(json.dumps({
    "extensions": len(extensions()),
    "flags": os.environ.get("XLA_FLAGS", ""),
    "messages": messages,
    "algorithm": get_runtime().random.algorithm(),
    "losses": [loss.item() for loss in losses],
    "counts": [counts.compiles, counts.executions, step.replays],
}))
"""


def _told(tuning: str, folder: Path) -> dict[str, object]:
    # In a file: code without source is not replayed.
    file = folder / "program.py"
    file.write_text(_PROGRAM, encoding="utf-8")
    environment = {**os.environ, "XLA_ADAPTERS_CPU_TUNING": tuning, "XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, str(file)], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.long
def test_it_can_be_left_out(tmp_path: Path) -> None:
    without, usual = _told("0", tmp_path), _told("1", tmp_path)
    assert (without["extensions"], usual["extensions"]) == (0, 1)
    for flag in ("--xla_disable_hlo_passes", "--xla_multiheap_size_constraint_per_heap"):
        assert flag not in str(without["flags"])
        assert flag in str(usual["flags"])
    assert len(without["messages"]) == 2  # type: ignore[arg-type]
    assert all("XLA_ADAPTERS_CPU_TUNING=0" in message for message in without["messages"])  # type: ignore[attr-defined]
    assert usual["messages"] == []
    assert without["algorithm"] == "default"
    assert without["counts"] == usual["counts"] == [1, 6, 4]
    assert without["losses"] == pytest.approx(usual["losses"], rel=1e-4)
