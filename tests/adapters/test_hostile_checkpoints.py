"""Whatever somebody put into the files of a checkpoint, a training that resumes from it runs none of it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from lightning import Fabric
from safetensors import SafetensorError

import xla_adapters
from lightning_strategy import XLAEagerFabricStrategy
from tests.isolation import run_in_child
from tests.lightning_strategy.scenarios import ANYTHING
from tests.planted import plants, saved, touching
from tests.trainers import checkpoint, contents, each_trainer, train, training
from xla_adapters.checkpoint import MANIFEST
from xla_adapters.errors import CheckpointUnsafeError
from xla_adapters.sharding import ShardingConfig

pytestmark = pytest.mark.isolated
# What holds pickles, and is read; transformers never reads training_args.bin.
_PICKLES = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "xla_adapters.trainer.pt", "meta.pt", ".metadata"}
# What is raised for files of other formats.
_OTHER = (CheckpointUnsafeError, RuntimeError, ValueError, OSError, KeyError, SafetensorError)


def assert_refused(path: Path, ran: Path, resume: Callable[[], Any]) -> None:
    """Each file in turn is replaced by one that runs code; a resume runs none, and names what it refuses."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    pickles = _PICKLES if path.is_dir() else {path.name}
    for file in files:
        intact = file.read_bytes()
        for name in ("torch.save", "pickle 4") if file.name in pickles else ("torch.save",):
            file.write_bytes(plants(ran)[name])
            with (
                pytest.raises(CheckpointUnsafeError) if file.name in pickles else contextlib.suppress(*_OTHER) as raised
            ):
                resume()
            assert raised is None or "nothing of it was run" in str(raised.value)
            assert not ran.exists(), (file, name)
        file.write_bytes(intact)
    resume()


@each_trainer
def test_every_file_that_a_trainer_saves(kind: str, tmp_path: Path) -> None:
    train(kind, tmp_path / "run", steps=2, save_every=2)
    path = checkpoint(kind, tmp_path / "run", 2)
    # Whoever plants a file writes a manifest, too; without one nothing is compared.
    if path.is_dir():
        (path / MANIFEST).unlink()
    assert_refused(path, tmp_path / "ran", lambda: training(kind, None, steps=2).run(path))


@each_trainer
def test_every_file_of_a_sharded_checkpoint(kind: str, tmp_path: Path) -> None:
    def saves() -> None:
        xla_adapters.initialize(spmd=True)
        sharding = ShardingConfig(scheme="fsdp", checkpoints="sharded")
        train(kind, tmp_path / "run", steps=2, save_every=2, batch=8, sharding=sharding)

    run_in_child(saves, env={"CPU_NUM_DEVICES": "8"})
    path = checkpoint(kind, tmp_path / "run", 2)
    (path / MANIFEST).unlink()
    assert ".metadata" in {file.name for file in path.rglob("*")}
    assert_refused(path, tmp_path / "ran", lambda: training(kind, None, steps=2, batch=8).run(path))


@pytest.mark.parametrize("shards", [False, True])
def test_what_fabric_loads(shards: bool, tmp_path: Path) -> None:
    if shards:
        xla_adapters.initialize(spmd=True)
    sharding = ShardingConfig(scheme="fsdp", checkpoints="sharded") if shards else None
    fabric = Fabric(strategy=XLAEagerFabricStrategy(sharding=sharding))
    fabric.launch()
    model = torch.nn.Linear(4, 2)
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    with fabric.strategy.step():
        fabric.backward(wrapped(torch.ones(4, 4, device=fabric.device)).sum())
        optimizer.step()
    state: dict[str, Any] = {"model": wrapped, "optimizer": optimizer, "arrays": numpy.arange(3), "path": tmp_path}
    path = tmp_path / "state.ckpt"
    fabric.save(path, state)
    if shards:
        (path / MANIFEST).unlink()
    assert_refused(path, tmp_path / "ran", lambda: fabric.load(path, state))
    assert state["arrays"].tolist() == [0, 1, 2]
    assert state["path"] == tmp_path


@each_trainer
def test_an_optimizer_may_keep_numbers_of_numpy(kind: str, tmp_path: Path) -> None:
    """As a schedule of the user's that computes with numpy leaves them in the groups."""

    def set_rate(moment: Any) -> None:
        for group in moment.optimizer.param_groups:
            group["lr"], group["note"] = numpy.float64(1e-2), numpy.arange(2)

    options: dict[str, Any] = {"steps": 4, "stock": {"lr_scheduler_type": "constant"} if kind == "hf" else {}}
    whole = train(kind, tmp_path, save_every=2, at={"step begin": set_rate}, **options)
    path = checkpoint(kind, tmp_path, 2)
    resumed = train(kind, tmp_path / "rest", resume=path, **options)
    assert resumed.losses == whole.losses[2:]
    assert resumed.trainer is not None
    assert contents(path)


@pytest.mark.skipif(not ANYTHING, reason="the argument came with Lightning 2.6")
def test_weights_only_false_is_the_users_word(tmp_path: Path) -> None:
    """In Lightning he may ask for what a file of his own needs."""
    fabric = Fabric(strategy=XLAEagerFabricStrategy())
    path, ran = tmp_path / "own.ckpt", tmp_path / "ran"
    path.write_bytes(saved({"more": touching(ran)}))
    with pytest.raises(CheckpointUnsafeError, match=r"own\.ckpt names posix\.system.*add_safe_globals"):
        fabric.load(path)
    assert not ran.exists()
    fabric.load(path, **ANYTHING)
    assert ran.exists()


def test_a_checkpoint_from_the_web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning alone would read anything from there."""
    ran = tmp_path / "ran"
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "far.ckpt").write_bytes(saved({"more": touching(ran)}))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "hub" / "far.ckpt").rename(tmp_path / "checkpoints" / "far.ckpt")
    strategy = XLAEagerFabricStrategy()
    monkeypatch.setattr("lightning_strategy.checkpoints.get_filesystem", lambda path: _There())
    with pytest.raises(CheckpointUnsafeError, match=r"far\.ckpt names posix\.system"):
        strategy.checkpoint_io.load_checkpoint("http://127.0.0.1:1/far.ckpt")
    assert not ran.exists()


class _There:
    def exists(self, path: str) -> bool:
        return True


def test_imports_that_are_planted(tmp_path: Path) -> None:
    sys.path.insert(0, str(tmp_path))
    fabric, path = Fabric(strategy=XLAEagerFabricStrategy()), tmp_path / "own.ckpt"
    path.write_bytes(plants(tmp_path / "ran")["torch.save of an import"])
    with pytest.raises(CheckpointUnsafeError, match=r"names planted_module\.value"):
        fabric.load(path)
    assert not (tmp_path / "ran").exists()
