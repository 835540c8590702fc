"""Errors of torch's and safetensors' writers: what the user is told of them."""

from __future__ import annotations

import collections
import errno
import os
import resource
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.isolation import run_in_child
from xla_adapters.checkpoint import CheckpointStore, storage
from xla_adapters.checkpoint.storage import naming_failed_writes
from xla_adapters.errors import CheckpointWriteError

_Usage = collections.namedtuple("_Usage", "total used free")
_WEIGHTS = {"w": torch.zeros(5000)}


def _torch(folder: Path) -> None:
    torch.save(_WEIGHTS, folder / "weights.pt")


def _safetensors(folder: Path) -> None:
    save_file(_WEIGHTS, folder / "weights.safetensors")


def _python(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(bytes(20000))


def _where_files_may_not_grow(child: Callable[[], str]) -> str:
    def limited() -> str:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
        return child()

    return run_in_child(limited)


@pytest.mark.parametrize("write", [_torch, _safetensors, _python])
@pytest.mark.parametrize("free", [0, None], ids=["full", "not full"])
def test_a_store_says_what_failed_and_what_is_left(
    write: Callable[[Path], None], free: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if free is not None:
        monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: _Usage(4096, 4096, free))

    def child() -> str:
        store = CheckpointStore(tmp_path)
        store.save(1, lambda folder: (folder / "state").write_text("old") and None)
        with pytest.raises(CheckpointWriteError) as caught:
            store.save(2, write)
        return str(caught.value)

    said = _where_files_may_not_grow(child)
    assert said.startswith(f"checkpoint 'checkpoint-2' was not saved to {tmp_path}: ")
    assert "those that were there still are: checkpoint-1" in said
    assert "inline_container" not in said
    if write is not _torch:
        assert os.strerror(errno.EFBIG) in said
    elif free is None:
        assert "a quota, or an error of the disk" in said
    else:
        assert "No space left on device; 3.9 KiB of 4.0 KiB are free there" in said
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


@pytest.mark.parametrize("write", [_torch, _safetensors])
def test_files_that_are_written_without_a_store(write: Callable[[Path], None], tmp_path: Path) -> None:
    def child() -> str:
        with pytest.raises(CheckpointWriteError) as caught, naming_failed_writes("the model", tmp_path):
            write(tmp_path)
        return str(caught.value)

    said = _where_files_may_not_grow(child)
    assert said.startswith(f"the model was not saved to {tmp_path}: ")


def test_a_folder_that_may_not_be_written_to() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        os.chmod(folder, 0o755)
        CheckpointStore(root).save(1, lambda path: (path / "state").write_text("old") and None)

        def child() -> str:
            os.chmod(root, 0o555)
            user = os.geteuid()
            if user == 0:
                os.seteuid(65534)
            try:
                with pytest.raises(CheckpointWriteError) as caught:
                    CheckpointStore(root).save(2, _python)
            finally:
                os.seteuid(user)
            return str(caught.value)

        said = run_in_child(child)
    assert "Permission denied" in said
    assert f"{root} has the mode 555 and belongs to user {os.geteuid()}; this process runs as user" in said


def test_other_errors_stay_as_they_are(tmp_path: Path) -> None:
    class Offline(OSError):
        """As those of HTTP libraries: an OSError without a number."""

    for error in (ValueError("mine"), RuntimeError("mine"), Offline("no network")):
        with pytest.raises(type(error)), naming_failed_writes("the model", tmp_path):
            raise error
