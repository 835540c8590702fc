"""A storage that refuses: the save raises, and what was there before is still there."""

from __future__ import annotations

import errno
import os
import resource
import signal
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.crash import history
from tests.crash.history import Form
from tests.crash.storages import Operation, Quick, Watched, WithoutExchange, failing, recording
from tests.isolation import run_in_child
from xla_adapters.checkpoint import MANIFEST, CheckpointStore, CheckpointWarning
from xla_adapters.checkpoint.storage import LocalStorage, Storage
from xla_adapters.errors import CheckpointWriteError

FORMS: dict[str, tuple[Form, Any]] = {
    "folders": (Form(), Quick),
    "folders, no exchange": (Form(), WithoutExchange),
    "one file": (Form(one_file=True), Quick),
    "objects": (Form(objects=True), history.object_storage),
}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", FORMS)
def test_each_change_fails_in_turn(name: str, code: int, tmp_path: Path) -> None:
    form, make = FORMS[name]
    log: list[Operation] = []
    history.run(form, tmp_path / "recorded", recording(make(), log), lambda saved: None)
    raised = 0
    for number in range(len(log)):
        root, saved = tmp_path / f"run-{number}", 0

        def count(done: int) -> None:
            nonlocal saved
            saved = done

        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", CheckpointWarning)
            try:
                history.run(form, root, failing(make(), number, code), count)
                told = ""
            except CheckpointWriteError as error:
                raised += 1
                told = str(error)
        # Only what comes after the commit may fail without an error: something superfluous is left then.
        told = told or "".join(str(warning.message) for warning in said)
        assert os.strerror(code) in told, log[number]
        assert str(root) in told
        try:
            history.check(form, root, saved, make())
        except AssertionError as error:
            raise AssertionError(f"{log[number]} failed: {error}") from error
    assert raised > len(log) // 2


def test_a_storage_that_keeps_failing(tmp_path: Path) -> None:
    """Not even the half written draft can be deleted; the next process does."""
    form, log = Form(), list[Operation]()
    history.run(form, tmp_path / "recorded", recording(WithoutExchange(), log), lambda saved: None)
    for number in range(len(log)):
        calls = 0

        def fail(name: str, args: tuple[Any, ...], number: int = number) -> None:
            nonlocal calls
            calls += 1
            if calls > number:
                raise OSError(errno.EIO, "Input/output error")

        saved, root = 0, tmp_path / f"run-{number}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            store = form.store(root, Watched(WithoutExchange(), fail))  # type: ignore[arg-type]
            try:
                for saved in range(len(history.STEPS)):
                    form.save(store, saved)
            except CheckpointWriteError:
                history.check(form, root, saved)
    assert saved < len(history.STEPS)


class _Shortening(LocalStorage):
    """Drops the end of what it is given, and says nothing."""

    def write(self, path: str, data: bytes, start: int | None = None) -> None:
        super().write(path, data[:-1], start)


class _Flipping(LocalStorage):
    """Returns what it was given with one bit changed, once the cache is dropped; but for the manifest."""

    def fsync(self, path: str) -> None:
        super().fsync(path)
        if path.endswith(MANIFEST):
            return
        data = bytearray(Path(path).read_bytes())
        data[len(data) // 2] ^= 4
        Path(path).write_bytes(data)


@pytest.mark.parametrize("storage", [_Shortening(), _Flipping()], ids=["short writes", "flipped bits"])
@pytest.mark.parametrize("one_file", [False, True])
def test_a_storage_that_lies_is_found_out_before_anything_is_replaced(
    storage: Storage, one_file: bool, tmp_path: Path
) -> None:
    form = Form(one_file=one_file)
    good = form.store(tmp_path, Quick())
    form.save(good, 0)

    def write(path: Path) -> None:
        # By the callback itself, not by the storage: what lies is what comes after.
        path.write_bytes(history.archive(1)) if one_file else (path / "weights.bin").write_bytes(b"new")

    with pytest.raises(CheckpointWriteError, match=r"read back|manifest|seal|archive|damaged"):
        form.store(tmp_path, storage).save(1, write, name=form.name(0), one_file=one_file)
    history.check(form, tmp_path, saved=1)


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    """The kernel itself cuts the write short, as a quota does."""

    def child() -> str:
        store = Form().store(tmp_path, LocalStorage())
        Form().save(store, 0)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        with pytest.raises(CheckpointWriteError) as caught:
            store.save(2, lambda folder: (folder / "weights").write_bytes(bytes(5000)) and None)
        return str(caught.value)

    assert "File too large" in run_in_child(child)
    history.check(Form(), tmp_path, saved=1)


def test_a_read_only_folder() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        root = Path(folder) / "run"
        store = CheckpointStore(root)
        Form().save(store, 0)
        Form().save(store, 1)
        (root / "checkpoint-2" / "weights.bin").write_bytes(b"damaged")

        def child() -> tuple[str, str, list[str]]:
            os.chmod(root, 0o555)
            user = os.geteuid()
            if user == 0:
                os.seteuid(65534)
            try:
                return as_reader()
            finally:
                # The result is written by whom the folder for results belongs to.
                os.seteuid(user)

        def as_reader() -> tuple[str, str, list[str]]:
            reader = CheckpointStore(root)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                newest = reader.newest_valid()
            assert newest is not None
            with pytest.raises(CheckpointWriteError) as caught:
                Form().save(reader, 2)
            told = [str(warning.message) for warning in said if issubclass(warning.category, CheckpointWarning)]
            return newest.name, str(caught.value), told

        name, error, said = run_in_child(child)
        assert name == "checkpoint-1"
        assert "Permission denied" in error
        assert len(said) == 1
        assert "checkpoint-2 is damaged and was passed over: weights.bin" in said[0]
