"""What a store promises when nothing goes wrong, and what it refuses."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import threading
import time
import warnings
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.crash.storages import Operation, Quick, recording
from tests.isolation import outcome_of
from tests.support import flip
from xla_adapters.checkpoint import (
    MANIFEST,
    CheckpointConfig,
    CheckpointStore,
    CheckpointWarning,
    storage,
    verify,
)
from xla_adapters.checkpoint.commands import adopt
from xla_adapters.checkpoint.storage import LocalStorage
from xla_adapters.errors import (
    CheckpointDamagedError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    ConfigError,
)


def writes(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "weights").write_text(text)

    return write


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_save_and_find(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "a" / "b", devices=8)
    assert store.newest_valid() is None
    first = store.save(5, writes("five"), settings={"lr": 0.1, "model": {"layers": 2}, "path": Path("x")})
    store.save(10, writes("ten"))
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [5, 10]
    newest = store.newest_valid()
    assert newest is not None
    assert (newest.name, newest.step) == ("checkpoint-10", 10)
    with store.local(newest) as folder:
        assert folder == tmp_path / "a" / "b" / "checkpoint-10"
    assert store.load(5) == store.load("checkpoint-5") == store.load(first.path) == first
    assert first.manifest.world == {"processes": 1, "devices": 8}
    assert first.manifest.settings == {"lr": 0.1, "model": {"layers": 2}, "path": "x"}
    assert set(first.manifest.versions) >= {"python", "torch", "torch_xla"}
    assert list(first.manifest.files) == ["weights"]
    assert json.loads((Path(first.path) / MANIFEST).read_text())["step"] == 5


def test_the_newest_is_that_of_the_highest_step(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (9, 100, 20):
        store.save(step, writes(str(step)))
    newest = store.newest_valid()
    assert newest is not None
    assert newest.step == 100


def test_a_save_that_raises_leaves_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, writes("one"))

    def fail(folder: Path) -> None:
        writes("half")(folder)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        store.save(1, fail)
    with pytest.raises(KeyboardInterrupt), store.writing(2):
        raise KeyboardInterrupt
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-1"]
    assert (Path(store.load(1).path) / "weights").read_text() == "one"


def test_a_framework_that_puts_the_name_together_itself(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with store.writing(3) as draft:
        folder = draft.path.parent / f"checkpoint-{3}"
        writes("three")(folder)
        assert not list(tmp_path.glob("checkpoint-*"))
    assert draft.checkpoint == store.newest_valid()


def test_rotation(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2, keep_every=4)
    for step in range(1, 8):
        store.save(step, writes(str(step)))
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-6", "checkpoint-7"]
    assert store.rotate(keep_last=1, protected=["checkpoint-6"]) == ["checkpoint-4"]
    assert names(tmp_path) == ["checkpoint-6", "checkpoint-7"]


def test_rotation_counts_what_is_valid_and_touches_nothing_else(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "checkpoint-99").mkdir()
    for step in (1, 2, 3):
        store.save(step, writes(str(step)))
    (tmp_path / "checkpoint-3" / "weights").write_text("x")
    with pytest.warns(CheckpointWarning, match="checkpoint-3 is damaged"):
        assert store.rotate(keep_last=1) == ["checkpoint-1"]
    assert names(tmp_path) == ["_damaged-checkpoint-3", "checkpoint-2", "checkpoint-99", "runs"]


def test_the_only_valid_one_stays(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, writes("one"))
    store.save(2, writes("two"))
    (tmp_path / "checkpoint-1" / "weights").unlink()
    with pytest.raises(CheckpointWriteError, match="checkpoint-2 stays: no other"):
        store.remove("checkpoint-2")
    store.remove("checkpoint-1")
    assert names(tmp_path) == ["checkpoint-2"]
    with pytest.raises(CheckpointNotFoundError):
        store.remove("checkpoint-1")


def test_asked_for_by_name(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, writes("one"))
    with pytest.raises(CheckpointNotFoundError, match=r"checkpoint-7: there is no such checkpoint; .*checkpoint-1"):
        store.load(7)
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(CheckpointDamagedError, match=r"no manifest .* repair .* --adopt checkpoint-2"):
        store.load(2)


def test_what_the_user_has_rewritten_is_loaded_if_he_says_so(tmp_path: Path) -> None:
    CheckpointStore(tmp_path).save(1, writes("one"))
    CheckpointStore(tmp_path).save(2, writes("two"))
    (tmp_path / "checkpoint-2" / "weights").unlink()
    (tmp_path / "checkpoint-2" / "converted").write_text("two")
    trusting = CheckpointStore(tmp_path, trust_files=True)
    said = r"checkpoint-2 differs from its manifest, and is loaded under trust_files=True: weights is missing"
    for find in (lambda: trusting.load(2), trusting.newest_valid, lambda: next(trusting.each_valid())):
        with pytest.warns(CheckpointWarning, match=said):
            found = find()
        assert found is not None
        assert found.step == 2
    with pytest.warns(CheckpointWarning, match=said):
        verify(tmp_path / "checkpoint-2", trust_files=True)
    # Its description must be whole all the same.
    flip(tmp_path / "checkpoint-2" / MANIFEST)
    with pytest.raises(CheckpointDamagedError, match="manifest"):
        trusting.load(2)
    with pytest.raises(CheckpointDamagedError, match="manifest"):
        verify(tmp_path / "checkpoint-2", trust_files=True)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]


def test_adopting_what_somebody_else_wrote(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    (tmp_path / "checkpoint-2" / "inner").mkdir(parents=True)
    (tmp_path / "checkpoint-2" / "inner" / "weights").write_text("two")
    with zipfile.ZipFile(tmp_path / "last.ckpt", "w") as archive:
        archive.writestr("weights", "three")
    with pytest.warns(CheckpointWarning, match="passed over"):
        assert store.newest_valid() is None
    adopt(store, "checkpoint-2", step=2)
    adopt(store, "last.ckpt", step=3)
    assert [checkpoint.name for checkpoint in store.checkpoints()] == ["checkpoint-2", "last.ckpt"]
    assert store.load("last.ckpt").step == 3
    assert list(store.load(2).manifest.files) == ["inner/weights"]
    with pytest.raises(CheckpointWriteError, match="has a manifest"):
        adopt(store, "checkpoint-2", step=2)


def test_nothing_is_written_before_it_is_flushed_and_read_back(tmp_path: Path) -> None:
    """The order of a commit, as the storage sees it."""
    log: list[Operation] = []
    store = CheckpointStore(tmp_path, storage=recording(Quick(), log))
    store.save(1, writes("one"))
    assert [name for name, _ in log] == [
        "make_folder",
        "make_folder",
        "fsync",
        "write",
        "fsync",
        "fsync_folder",
        "rename",
        "fsync_folder",
        "remove_folder",
    ]


def test_links_are_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointWriteError, match="is a link"):
        store.save(1, lambda folder: (folder / "weights").symlink_to(tmp_path / "elsewhere"))
    assert names(tmp_path) == []


def test_one_file_must_be_an_archive(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointWriteError, match="no zip archive"):
        store.save(1, lambda path: path.write_text("text") and None, name="last.ckpt", one_file=True)


def test_large_settings_of_one_file(tmp_path: Path) -> None:
    store, settings = CheckpointStore(tmp_path), {"text": "x" * 70_000}

    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("weights", "three")

    small = store.save(1, lambda folder: (folder / "a").touch(), settings=settings)
    saved = store.save(1, write, name="last.ckpt", one_file=True, settings=settings)
    assert store.load("last.ckpt") == saved
    assert saved.manifest.settings == {}
    assert saved.manifest.settings_digest == small.manifest.settings_digest


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "_x", "replaced"])
def test_names_that_cannot_be(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be the name"):
        CheckpointStore(tmp_path).save(1, writes("one"), name=name)


def test_two_writers_take_turns(tmp_path: Path) -> None:
    one, other = CheckpointStore(tmp_path), CheckpointStore(tmp_path)
    order: list[str] = []

    def save() -> None:
        other.save(2, writes("two"))
        order.append("other")

    with one.writing(1) as draft:
        thread = threading.Thread(target=save)
        thread.start()
        thread.join(0.2)
        # Had the other one come in, it would have taken the draft for one that was left behind.
        assert draft.path.is_dir()
        order.append("one")
    thread.join()
    assert order == ["one", "other"]
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]


def test_a_process_that_dies_leaves_no_lock_to_its_children(tmp_path: Path) -> None:
    """As the workers of a loader, which were forked while a checkpoint was written."""
    worker = tmp_path / "worker"

    def dies() -> None:
        with CheckpointStore(tmp_path / "run").writing(1):
            pid = os.fork()
            if pid == 0:
                os.setsid()
                time.sleep(600)
                os._exit(0)
            worker.write_text(str(pid))
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        assert outcome_of(dies).error == "the process died with signal 9"
        saved = outcome_of(lambda: CheckpointStore(tmp_path / "run").save(2, writes("two")).step)
        os.kill(int(worker.read_text()), 0)
    finally:
        os.kill(int(worker.read_text()), signal.SIGKILL)
    assert saved.value == 2, saved.error
    assert names(tmp_path / "run") == ["checkpoint-2"]


def test_two_processes_take_turns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, go = tmp_path / "ready", tmp_path / "go"

    def other() -> None:
        with CheckpointStore(tmp_path / "run").writing(1) as draft:
            ready.touch()
            while not go.exists():
                time.sleep(0.01)
            assert draft.path.is_dir()

    class LetsGo(logging.Handler):
        """The other one goes on when this one says that it waits."""

        def emit(self, record: logging.LogRecord) -> None:
            go.touch()

    monkeypatch.setattr(storage._log, "handlers", [LetsGo()])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(outcome_of, other)
        while not ready.exists():
            assert not waiting.done(), waiting.result()
            time.sleep(0.01)
        CheckpointStore(tmp_path / "run").save(2, writes("two"))
        assert waiting.result().ok, waiting.result().error
    assert "another process saves to" in caplog.text
    assert names(tmp_path / "run") == ["checkpoint-1", "checkpoint-2"]


def test_one_process_at_a_time_where_each_removes_its_lock(tmp_path: Path) -> None:
    """None is inside with another one, though each finds the lock that it waited for removed."""
    counter, turns = tmp_path / "counter", 150
    counter.write_text("0")

    def count() -> None:
        for _ in range(turns):
            with LocalStorage().locked(str(tmp_path)):
                before = int(counter.read_text())
                time.sleep(0)
                counter.write_text(str(before + 1))

    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(lambda _: outcome_of(count), range(4)))
    assert all(outcome.ok for outcome in outcomes), outcomes
    assert int(counter.read_text()) == 4 * turns
    assert names(tmp_path) == ["counter"]


def test_the_lock_of_a_process_that_died_is_removed_by_the_next(tmp_path: Path) -> None:
    def dies() -> None:
        with LocalStorage().locked(str(tmp_path)):
            os.kill(os.getpid(), signal.SIGKILL)

    outcome_of(dies)
    assert names(tmp_path) == ["_lock"]
    CheckpointStore(tmp_path).save(1, writes("one"))
    assert names(tmp_path) == ["checkpoint-1"]


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(code: int) -> Callable[[object, int], None]:
        def lockf(stream: object, operation: int) -> None:
            raise OSError(code, os.strerror(code))

        return lockf

    store = CheckpointStore(tmp_path)
    monkeypatch.setattr("fcntl.lockf", refuse(errno.ENOLCK))
    assert store.save(1, writes("one")).step == 1
    monkeypatch.setattr("fcntl.lockf", refuse(errno.EIO))
    with pytest.raises(CheckpointWriteError, match=r"checkpoint-2.*Input/output error"):
        store.save(2, writes("two"))


def test_the_same_thread_may_look_while_it_writes(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, writes("one"))
    with store.writing(2):
        newest = store.newest_valid()
    assert newest is not None
    assert newest.step == 1


def test_an_object_store(tmp_path: Path) -> None:
    store = CheckpointStore(f"memory://bucket/{tmp_path.name}", keep_last=2)
    for step in (1, 2, 3, 3):
        store.save(step, writes(str(step)))
    # A second one of a step has a name of its own: nothing can be exchanged here.
    assert [checkpoint.name for checkpoint in store.checkpoints()] == ["checkpoint-2", "checkpoint-3.r1"]
    newest = store.newest_valid()
    assert newest is not None
    with store.local(newest) as folder:
        assert (folder / "weights").read_text() == "3"
    assert not folder.exists()
    store.storage.write(f"{newest.path}/weights", b"4")
    with pytest.raises(CheckpointDamagedError, match="did not arrive as it was written: weights"):
        store.local(newest).__enter__()
    with pytest.warns(CheckpointWarning, match=r"checkpoint-3.r1 is damaged and was passed over"):
        older = store.newest_valid()
    assert older is not None
    assert older.step == 2


def test_one_file_in_an_object_store(tmp_path: Path) -> None:
    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("weights", "three")

    store = CheckpointStore(f"memory://bucket/{tmp_path.name}")
    for step in (1, 2):
        store.save(step, write, name="last.ckpt", one_file=True)
    (found,) = store.checkpoints()
    assert (found.name, found.step) == ("last.ckpt", 2)
    with store.local(found) as path, zipfile.ZipFile(path) as archive:
        assert archive.read("weights") == b"three"


def test_urls_that_nothing_knows() -> None:
    with pytest.raises(ConfigError, match="nosuch"):
        CheckpointStore("nosuch://bucket")
    assert isinstance(CheckpointStore("file:///tmp/x").storage, LocalStorage)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps=0"),
        ({"keep_last": True}, "keep_last=True"),
        ({"every": -1}, "every="),
        ({"save_on": "exit"}, "save_on='exit'"),
        ({"asynchronous": "yes"}, "asynchronous='yes'"),
        ({"preemption_signals": ["SIGKILL"]}, r"preemption_signals=\('SIGKILL',\).*SIGTERM"),
        ({"preemption_exit_code": 256}, "preemption_exit_code=256"),
        ({"keep_every": 5}, "keep_every"),
        ({"evry": 5}, r"unknown option\(s\) evry; valid options: every_n_steps"),
    ],
)
def test_options_that_cannot_work(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckpointConfig.from_dict(values)


def test_no_warning_without_a_reason(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = CheckpointStore(tmp_path, keep_last=1)
        for step in (1, 2, 2):
            store.save(step, writes(str(step)))
        assert store.newest_valid() is not None
