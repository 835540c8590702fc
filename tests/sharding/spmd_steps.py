"""Run as a program: small steps on 8 CPU devices; prints which dumped module is which, as JSON.

Started afresh by test_communication_volume.py: XLA reads its flags once, when the first module is compiled.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

FOLDER = Path(sys.argv[1])
MODULES: dict[str, str] = {}


def modules() -> set[str]:
    return {path.name for path in FOLDER.glob("*.cpu_after_optimizations.txt")}


def compiled(name: str) -> None:
    before = modules()
    torch_xla.sync()
    (new,) = modules() - before
    MODULES[name] = new


def tensor(*shape: int, mesh: xs.Mesh, spec: tuple[object, ...]) -> torch.Tensor:
    value = torch.ones(*shape).to(torch_xla.device())
    xs.mark_sharding(value, mesh, spec)
    return value


def main() -> None:
    xr.use_spmd()
    devices = np.arange(8)
    line = xs.Mesh(devices, (8,), ("data",))
    grid = xs.Mesh(devices, (2, 4), ("data", "model"))

    # Data parallel: the gradient of a (32, 16) weight and the loss are summed over all devices.
    batch = tensor(64, 32, mesh=line, spec=("data", None))
    weight = torch.ones(32, 16).to(torch_xla.device()).requires_grad_()
    loss = (batch @ weight).square().sum()
    loss.backward()
    with torch.no_grad():
        weight -= 0.1 * weight.grad
    compiled("data parallel")

    # Tensor parallel: the first weight by columns, the second by rows, their product summed over `model`.
    inputs = tensor(64, 32, mesh=grid, spec=("data", None))
    up = tensor(32, 48, mesh=grid, spec=(None, "model"))
    down = tensor(48, 32, mesh=grid, spec=("model", None))
    outputs = torch.relu(inputs @ up) @ down
    xs.mark_sharding(outputs, grid, ("data", None))
    compiled("tensor parallel")

    # Another dimension is split: every device keeps an eighth of what it has and sends the rest.
    turned = batch * 2
    xs.mark_sharding(turned, line, (None, "data"))
    compiled("all to all")

    # Whole again, in half the bytes.
    gathered = tensor(64, 32, mesh=grid, spec=("model", None)).to(torch.bfloat16)
    xs.mark_sharding(gathered, grid, (None, None))
    compiled("gather")

    # A dimension over two axes, either way round.
    one = tensor(64, 32, mesh=grid, spec=(("data", "model"), None))
    other = tensor(64, 32, mesh=grid, spec=(("model", "data"), None))
    doubled = (one * 2, other * 3)
    compiled("two axes")
    assert len(doubled) == 2
    print(json.dumps(MODULES))


main()
