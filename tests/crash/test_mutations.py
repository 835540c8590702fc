"""The crash tests fail when what they guard is taken away (flushes: see `test_power_cuts`)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.crash import history
from tests.crash.history import Form
from tests.crash.storages import Operation, Quick, Watched, recording
from tests.crash.test_power_cuts import replay
from xla_adapters.checkpoint import commit
from xla_adapters.checkpoint.storage import CHANGES, Storage, join, remove_tree, walk


class _CopiesInsteadOfRenaming(Watched):
    """What `shutil.move` does between two file systems: the new name is there before all of the content is."""

    def rename(self, old: str, new: str) -> None:
        inner: Storage = self._inner  # a storage that records each part
        if os.path.isfile(old):
            inner.write(new, inner.read(old))
            inner.fsync(new)
            inner.remove(old)
            return
        inner.make_folder(new)
        for relative, entry in sorted(walk(inner, old), key=lambda item: item[0]):
            if entry.is_folder:
                inner.make_folder(join(new, relative))
            else:
                inner.write(join(new, relative), inner.read(join(old, relative)))
                inner.fsync(join(new, relative))
        for relative, entry in walk(inner, new):
            if entry.is_folder:
                inner.fsync_folder(join(new, relative))
        inner.fsync_folder(new)
        remove_tree(inner, old)

    def exchange(self, one: str, other: str) -> bool:
        return False


def _replay(form: Form, storage: Storage, log: list[Operation], root: Path, scratch: Path) -> None:
    returned: list[int] = []
    root.mkdir()
    history.run(form, root, storage, lambda saved: returned.append(len(log)))
    replay(form, log, returned, root, scratch)


@pytest.mark.parametrize("form", [Form(), Form(one_file=True)], ids=["folders", "one file"])
def test_a_rename_that_is_no_rename(form: Form, tmp_path: Path) -> None:
    log: list[Operation] = []
    storage = _CopiesInsteadOfRenaming(recording(Quick(), log), lambda name, args: None)
    with pytest.raises(AssertionError, match="half a checkpoint under its name"):
        _replay(form, storage, log, tmp_path / "root", tmp_path / "scratch")  # type: ignore[arg-type]


def test_the_old_one_deleted_before_the_new_one_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch_xla's CheckpointManager does it."""
    begin = commit.RenameCommit.begin

    def delete_first(self: commit.RenameCommit, name: str, one_file: bool) -> commit.Draft:
        remove_tree(self._storage, join(self._root, name))
        return begin(self, name, one_file)

    monkeypatch.setattr(commit.RenameCommit, "begin", delete_first)
    log: list[Operation] = []
    with pytest.raises(AssertionError):
        _replay(Form(), recording(Quick(), log), log, tmp_path / "root", tmp_path / "scratch")


def test_names_not_flushed_before_the_old_one_is_deleted(tmp_path: Path) -> None:
    log: list[Operation] = []

    class NeverFlushesTheRoot(Watched):
        def fsync_folder(self, path: str) -> None:
            if path != str(tmp_path / "root"):
                self._inner.fsync_folder(path)

    storage = NeverFlushesTheRoot(recording(Quick(), log), lambda name, args: None)
    with pytest.raises(AssertionError):
        _replay(Form(), storage, log, tmp_path / "root", tmp_path / "scratch")  # type: ignore[arg-type]


def test_the_list_of_changes_is_that_of_the_interface() -> None:
    """A new operation is either a change, and tried, or one that only looks."""
    looks = {"entries", "entry", "read", "download", "digest", "locked"}
    methods = {name for name in vars(Storage) if not name.startswith("_")}
    assert methods == looks | set(CHANGES)
