"""Going on from where a run was: random numbers, and what differs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import xla_adapters
from tests.isolation import isolated
from tests.support import Loop
from xla_adapters.checkpoint import (
    CheckpointMismatchWarning,
    CheckpointStore,
    TrainingState,
    differences,
    warn_of_differences,
)
from xla_adapters.errors import CheckpointDamagedError


def draw() -> list[Any]:
    return [random.random(), numpy.random.rand(), torch.rand(3).tolist(), torch.rand(3, device="xla").cpu().tolist()]


@isolated
def test_all_generators_go_on_as_they_would_have(tmp_path: Path) -> None:
    draw()
    numpy.random.randn()  # leaves a second value waiting
    state = TrainingState.capture({"sampler": {"epoch": 2, "seen": 17}})
    state.save(tmp_path)
    expected = [draw(), draw(), numpy.random.randn()]
    assert draw() != expected[0]
    loaded = TrainingState.load(tmp_path)
    assert loaded is not None
    assert loaded.positions == {"sampler": {"epoch": 2, "seen": 17}}
    loaded.restore()
    assert [draw(), draw(), numpy.random.randn()] == expected
    assert TrainingState.load(tmp_path, rank=1) is None
    torch.save({"other": 1}, tmp_path / "xla_adapters.training_state-1.pt")
    with pytest.raises(CheckpointDamagedError, match="holds no TrainingState"):
        TrainingState.load(tmp_path, rank=1)


@isolated
def test_losses_under_dropout_go_on_bit_for_bit(tmp_path: Path) -> None:
    loop, store = Loop(), CheckpointStore(tmp_path)
    xla_adapters.prime(loop.optimizer)
    step = xla_adapters.step()(loop.body)

    def write(folder: Path) -> None:
        state = {"model": loop.model.state_dict(), "optimizer": loop.optimizer.state_dict()}
        torch.save(xla_adapters.checkpoint.snapshot(state), folder / "state.pt")  # type: ignore[attr-defined]
        TrainingState.capture().save(folder)

    for _ in range(3):
        step()
    store.save(3, write)
    expected = [step().item() for _ in range(4)]
    newest = store.newest_valid()
    assert newest is not None
    saved = torch.load(Path(newest.path) / "state.pt")
    again = Loop()
    again.model.load_state_dict(saved["model"])
    again.optimizer.load_state_dict(saved["optimizer"])
    state = TrainingState.load(Path(newest.path))
    assert state is not None
    state.restore()
    resumed = xla_adapters.step()(again.body)
    assert [resumed().item() for _ in range(4)] == expected


def test_what_differs_is_shown_as_a_diff(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    settings = {"lr": 0.1, "steps": 10, "model": {"layers": 2, "width": 8}}
    saved = store.save(1, lambda folder: (folder / "a").touch(), settings=settings)
    world = {"processes": 1, "devices": 1}
    assert differences(saved.manifest, settings=settings, world=world) == []
    changed = {"lr": 0.2, "steps": 20, "model": {"layers": 2, "heads": 4}}
    lines = differences(saved.manifest, settings=changed, world={"processes": 1, "devices": 8}, ignore=["steps"])
    assert lines == [
        "- world.devices: 1",
        "+ world.devices: 8",
        "- lr: 0.1",
        "+ lr: 0.2",
        "+ model.heads: 4",
        "- model.width: 8",
    ]
    with pytest.warns(CheckpointMismatchWarning, match=r"(?s)checkpoint-1 was saved by another run.*\+ lr: 0.2"):
        warn_of_differences(saved, lines)


def test_other_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = CheckpointStore(tmp_path).save(1, lambda folder: (folder / "a").touch())
    monkeypatch.setattr(
        "xla_adapters.checkpoint.training_state.versions", lambda _: {**saved.manifest.versions, "torch": "9.9"}
    )
    assert differences(saved.manifest) == ["- versions.torch: '2.9.0'", "+ versions.torch: '9.9'"]
