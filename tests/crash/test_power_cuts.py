"""Every state that a power cut may leave, between any two operations, must be one a run resumes from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.crash import history
from tests.crash.disk import Disk, materialise, operation_kind
from tests.crash.history import Form
from tests.crash.storages import Operation, Quick, WithoutExchange, recording
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
