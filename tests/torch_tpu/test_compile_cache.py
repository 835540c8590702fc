"""Programs that one process has compiled are loaded by the next one, on TorchTPU, too."""

from __future__ import annotations

import shutil
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import xla_adapters
from tests.device import DEVICE
from tests.isolation import run_in_child
from tests.torch_tpu import stand_in
from xla_adapters import get_runtime
from xla_adapters.runtime.compile_cache import default_folder, entries

_HERE: dict[str, str] = {"XLA_ADAPTERS_CACHE_DIR": ""}


def _train(folder: Path | None) -> tuple[list[float], int, int, int]:
    """Losses; compiles that we count, and that the plugin counts; loads."""
    xla_adapters.initialize(cache_dir=None if folder is None else str(folder))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    @xla_adapters.CompiledStep
    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses = [step(torch.randn(8, 4)).item() for _ in range(5)]
    (torch.ones(3, device=DEVICE) + 1).cpu()
    counted = get_runtime().counters.metrics()
    # A child ends at once, and TorchTPU writes in the background.
    where, limit = folder or default_folder(), time.monotonic() + 30
    while len(entries(where)) < counted.compiles + counted.eager_compiles and time.monotonic() < limit:
        time.sleep(0.05)
    get_runtime().counters.metrics()
    return losses, counted.compiles + counted.eager_compiles, stand_in.counts().compiles, counted.loads


def test_the_next_process_compiles_nothing(tmp_path: Path) -> None:
    first, again = (run_in_child(partial(_train, tmp_path), env=_HERE) for _ in range(2))
    assert first[1] == first[2] > 0
    assert again[1:] == (0, 0, first[1])
    assert again[0] == first[0]


def test_it_is_there_by_default(tmp_path: Path) -> None:
    env = {**_HERE, "XDG_CACHE_HOME": str(tmp_path)}
    first, again = (run_in_child(partial(_train, None), env=env) for _ in range(2))
    assert (first[3], again[2]) == (0, 0)
    assert again[0] == first[0]


def test_a_damaged_program_is_compiled_again(tmp_path: Path) -> None:
    first = run_in_child(partial(_train, tmp_path), env=_HERE)
    shutil.rmtree("/dev/shm/torch_tpu_cache")
    damaged = [entry.path for entry in entries(tmp_path)]
    for path in damaged:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    assert len(damaged) == first[1]
    assert run_in_child(partial(_train, tmp_path), env=_HERE) == first
    assert all(entry.problem() is None for entry in entries(tmp_path))


def _too_late(folder: Path) -> None:
    xla_adapters.initialize()
    (torch.ones(3, device=DEVICE) + 1).cpu()
    with pytest.raises(xla_adapters.RuntimeOrderError, match="before a tensor or model is moved"):
        xla_adapters.initialize(cache_dir=str(folder))


def test_too_late_is_an_error(tmp_path: Path) -> None:
    run_in_child(partial(_too_late, tmp_path), env={"XLA_ADAPTERS_CACHE_DIR": "off"})
