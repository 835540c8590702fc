"""Saving in the background: what is saved is what was there, and no failure is lost."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_adapters
from tests.crash.storages import Operation, Quick, failing, recording
from tests.isolation import isolated
from tests.support import Loop, differences, state_of
from xla_adapters.checkpoint import SAVE_FAILED_EXIT_CODE, AsyncSaver, CheckpointStore, snapshot
from xla_adapters.errors import CheckpointSaveError, CheckpointWriteError


def write_text(state: str, folder: Path) -> None:
    (folder / "state").write_text(state)


def text_of(store: CheckpointStore) -> str:
    newest = store.newest_valid()
    assert newest is not None
    return (Path(newest.path) / "state").read_text()


@isolated
def test_later_steps_do_not_change_what_is_saved(tmp_path: Path) -> None:
    """The writer starts only after three more steps, which reuse the buffers of the first one's results."""
    loop, go = Loop(), threading.Event()
    xla_adapters.prime(loop.optimizer)
    step = xla_adapters.step()(loop.body)
    step()
    expected = snapshot({"model": loop.model.state_dict(), "optimizer": loop.optimizer.state_dict()})
    seed = xla_adapters.get_runtime().random.seed()

    def write(state: dict[str, Any], folder: Path) -> None:
        assert go.wait(240)
        torch.save(state, folder / "state.pt")

    with AsyncSaver(CheckpointStore(tmp_path)) as saver:
        with xla_adapters.count() as counted:
            saver.save(1, {"model": loop.model.state_dict(), "optimizer": loop.optimizer.state_dict()}, write)
        assert xla_adapters.get_runtime().random.seed() == seed
        assert (counted.executions, counted.transfers_to_host) == (0, 1)
        for _ in range(3):
            step()
        assert saver.in_flight
        assert not list(tmp_path.glob("checkpoint-*"))
        go.set()
        saved = saver.wait()
    assert saved is not None
    found = torch.load(Path(saved.path) / "state.pt")
    for name, value in expected["model"].items():
        assert torch.equal(found["model"][name], value), name
    for index, values in expected["optimizer"]["state"].items():
        for name, value in values.items():
            assert torch.equal(found["optimizer"]["state"][index][name], value), (index, name)
    after = loop.model.state_dict()["first.weight"].cpu()
    assert not torch.equal(after, expected["model"]["first.weight"])


@isolated
def test_not_inside_a_step(tmp_path: Path) -> None:
    loop, store = Loop(), CheckpointStore(tmp_path)
    saver = AsyncSaver(store)
    before = state_of(loop.model, loop.optimizer)
    for save in (lambda: saver.save(1, loop.model.state_dict(), torch.save), lambda: store.save(1, lambda path: None)):
        with pytest.raises(CheckpointSaveError, match="inside a step"), xla_adapters.step():
            loop.body()
            save()
    assert differences(before, state_of(loop.model, loop.optimizer)) == []
    assert not list(tmp_path.iterdir())


@isolated
def test_a_snapshot_keeps_what_is_one_and_copies_the_rest() -> None:
    linear = torch.nn.Linear(2, 2)
    on_device = torch.ones(3).to("xla")
    state = {
        "model": linear.state_dict(),
        "tied": [linear.weight, linear.weight, on_device, on_device],
        "numbers": {"list": [1, [2]]},
        "view": linear.weight[0],
    }
    copied = snapshot(state)
    assert copied["tied"][0] is copied["tied"][1]
    assert copied["tied"][2] is copied["tied"][3]
    assert copied["tied"][2].device.type == "cpu"
    assert type(copied["model"]) is type(state["model"])
    assert copied["model"]._metadata == linear.state_dict()._metadata  # type: ignore[attr-defined]
    weight = copied["model"]["weight"].clone()
    with torch.no_grad():
        linear.weight.zero_()
    state["numbers"]["list"][1].append(3)  # type: ignore[index,call-overload,union-attr]
    assert torch.equal(copied["model"]["weight"], weight)
    assert torch.equal(copied["view"], weight[0])
    assert copied["numbers"] == {"list": [1, [2]]}


def test_one_at_a_time(tmp_path: Path) -> None:
    go, order = threading.Event(), list[str]()

    def slow(state: str, folder: Path) -> None:
        assert go.wait(240)
        order.append(state)
        write_text(state, folder)

    with AsyncSaver(CheckpointStore(tmp_path)) as saver:
        saver.save(1, "one", slow, take=str)
        threading.Timer(0.1, go.set).start()
        saver.save(2, "two", slow, take=str)
        assert order[0] == "one"
        assert (tmp_path / "checkpoint-1").is_dir()
    assert order == ["one", "two"]


def test_failures_surface_at_the_next_save_at_wait_and_at_the_end(tmp_path: Path) -> None:
    def fail(state: str, folder: Path) -> None:
        raise ValueError(state)

    saver = AsyncSaver(CheckpointStore(tmp_path))
    saver.save(1, "first", fail, take=str)
    with pytest.raises(ValueError, match="first"):
        saver.save(2, "second", write_text, take=str)
    saver.save(3, "third", fail, take=str)
    with pytest.raises(ValueError, match="third"):
        saver.wait()
    assert saver.wait() is None
    with pytest.raises(ValueError, match="fourth"), saver:
        saver.save(4, "fourth", fail, take=str)
    saver.save(5, "fifth", write_text, take=str)
    saved = saver.wait()
    assert saved is not None
    assert saved.step == 5


def test_the_error_of_the_run_is_not_hidden_by_that_of_the_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(state: str, folder: Path) -> None:
        raise ValueError(state)

    with pytest.raises(KeyError, match="mine"), AsyncSaver(CheckpointStore(tmp_path)) as saver:
        saver.save(1, "lost", fail, take=str)
        raise KeyError("mine")
    assert "ValueError: lost" in capsys.readouterr().err


def test_a_full_disk_whenever_it_gets_full(tmp_path: Path) -> None:
    log: list[Operation] = []
    CheckpointStore(tmp_path / "recorded", storage=recording(Quick(), log)).save(1, lambda path: write_text("", path))
    raised = 0
    for number in range(len(log)):
        root = tmp_path / str(number)
        CheckpointStore(root, storage=Quick()).save(1, lambda path: write_text("old", path))
        store = CheckpointStore(root, storage=failing(Quick(), number, errno.ENOSPC))
        saver = AsyncSaver(store)
        saver.save(2, "new", write_text, take=str)
        try:
            saver.wait()
            expected = {"new"}
        except CheckpointWriteError as error:
            raised += 1
            expected = {"old", "new"}
            assert "No space left on device" in str(error)  # noqa: PT017 (not each of them raises)
        assert text_of(CheckpointStore(root, storage=Quick())) in expected
    assert raised > 4


_LEFT_ALONE = """
import sys
from pathlib import Path
from xla_adapters.checkpoint import AsyncSaver, CheckpointStore

def write(state, folder):
    if sys.argv[2] == "fail":
        raise OSError(28, "No space left on device")
    (folder / "state").write_text(state)

saver = AsyncSaver(CheckpointStore(sys.argv[1]))
saver.save(1, "text", write, take=str)
"""


@pytest.mark.parametrize(("how", "status"), [("work", 0), ("fail", SAVE_FAILED_EXIT_CODE)])
def test_at_the_end_of_a_process_that_does_not_wait(how: str, status: int, tmp_path: Path) -> None:
    """A new interpreter: what it does at its end cannot be seen in a fork."""
    done = subprocess.run(
        [sys.executable, "-c", _LEFT_ALONE, str(tmp_path), how],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == status, done.stderr
    assert ("No space left on device" in done.stderr) == (how == "fail")
    assert (tmp_path / "checkpoint-1").is_dir() == (how == "work")
