"""Every state that a power cut may leave, between any two operations, must be one a run resumes from."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash import history
from tests.crash.disk import Disk, materialise, operation_kind
from tests.crash.history import Form
from tests.crash.storages import Operation, Quick, WithoutExchange, recording
from xla_adapters.checkpoint import CheckpointStore, CheckpointWarning
from xla_adapters.checkpoint.commands import adopt
from xla_adapters.checkpoint.storage import Storage

FORMS = {
    "folders": (Form(), Quick),
    "folders, no exchange": (Form(), WithoutExchange),
    "one file": (Form(one_file=True), Quick),
}


def record(form: Form, storage: Storage, root: Path) -> tuple[list[Operation], list[int]]:
    """The changes of a history, and how many of them there were when each save returned."""
    log: list[Operation] = []
    returned: list[int] = []
    root.mkdir()
    history.run(form, root, recording(storage, log), lambda saved: returned.append(len(log)))
    return log, returned


def replay(form: Form, log: list[Operation], returned: list[int], root: Path, scratch: Path) -> int:
    """Checks every state after every prefix of a history; returns how many there were."""
    disk, states = Disk(str(root)), 0
    seen = set()
    for length in range(len(log) + 1):
        if length:
            disk.apply(log[length - 1])
        saved = sum(count <= length for count in returned)
        for tree in disk.after_power_cut(seed=length):
            key = (saved, tuple(sorted(tree.items(), key=lambda item: item[0])))
            if key in seen:
                continue
            seen.add(key)
            states += 1
            materialise(tree, scratch)
            try:
                history.check(form, scratch, saved)
            except AssertionError as error:
                done = log[length - 1] if length else "nothing"
                raise AssertionError(f"power cut after operation {length}, {done}: {error}\n{sorted(tree)}") from error
            finally:
                shutil.rmtree(scratch)
    return states


@pytest.mark.parametrize("name", FORMS)
def test_every_state_a_power_cut_may_leave(name: str, tmp_path: Path) -> None:
    form, kind = FORMS[name]
    log, returned = record(form, kind(), tmp_path / "root")
    states = replay(form, log, returned, tmp_path / "root", tmp_path / "scratch")
    assert states > 2 * len(log)


@pytest.mark.parametrize("name", FORMS)
def test_without_any_of_the_flushes_something_would_be_lost(name: str, tmp_path: Path) -> None:
    form, kind = FORMS[name]
    root = tmp_path / "root"
    log, returned = record(form, kind(), root)
    flushes = {operation_kind(operation, str(root)) for operation in log if operation[0].startswith("fsync")}
    assert len(flushes) >= 2
    unneeded = []
    for flush in sorted(flushes):
        kept = [operation for operation in log if operation_kind(operation, str(root)) != flush]
        counts = [sum(operation_kind(operation, str(root)) != flush for operation in log[:count]) for count in returned]
        try:
            replay(form, kept, counts, root, tmp_path / "scratch")
        except AssertionError:
            continue
        unneeded.append(flush)
    assert unneeded == [], "a power cut is survived without these: they do nothing, or the test is blind"


def _states(log: list[Operation], begin: int, root: Path, scratch: Path) -> Iterator[tuple[int, Path]]:
    """Every state that a power cut may leave after at least `begin` operations, in a folder."""
    disk = Disk(str(root))
    for length, operation in enumerate(log, start=1):
        disk.apply(operation)
        if length >= begin:
            for tree in disk.after_power_cut(seed=length):
                materialise(tree, scratch)
                yield length, scratch
                shutil.rmtree(scratch)


def test_adopting_is_cut_off(tmp_path: Path) -> None:
    log: list[Operation] = []
    root, storage, folder = tmp_path / "root", recording(Quick(), log), tmp_path / "root" / "checkpoint-2"
    root.mkdir()
    storage.make_folder(str(folder))
    storage.write(str(folder / "weights"), b"theirs")
    storage.fsync_folder(str(root))
    begin = len(log)
    adopt(CheckpointStore(root, storage=storage), "checkpoint-2", step=2)
    found = set()
    for length, scratch in _states(log, begin, root, tmp_path / "scratch"):
        store = CheckpointStore(scratch, storage=Quick())
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            newest = store.newest_valid()
        assert all("it has no manifest" in str(warning.message) for warning in said)
        found.add(newest is not None)
        assert newest is not None or length < len(log)
        if newest is not None:
            assert (scratch / "checkpoint-2" / "weights").read_bytes() == b"theirs"
    assert found == {False, True}


def test_setting_aside_and_removing_are_cut_off(tmp_path: Path) -> None:
    log: list[Operation] = []
    root, storage = tmp_path / "root", recording(Quick(), log)
    root.mkdir()
    store = CheckpointStore(root, storage=storage)
    for step in (1, 2, 3):
        store.save(step, lambda path, step=step: storage.write(str(path / "weights"), bytes([step]) * 20))
    storage.write(str(root / "checkpoint-3" / "weights"), b"damaged")
    storage.fsync(str(root / "checkpoint-3" / "weights"))
    begin = len(log)
    with pytest.warns(CheckpointWarning, match="checkpoint-3 is damaged"):
        assert store.rotate(keep_last=1) == ["checkpoint-1"]
    for _, scratch in _states(log, begin, root, tmp_path / "scratch"):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            newest = CheckpointStore(scratch, storage=Quick()).newest_valid()
        assert newest is not None
        assert newest.step == 2
        # Of the one that is being removed nobody hears.
        assert all("checkpoint-3 is damaged" in str(warning.message) for warning in said)
        removed = scratch / "checkpoint-1"
        assert not removed.exists() or (removed / "weights").read_bytes() == bytes([1]) * 20
