"""A short history of saves, and what must hold of the folder whenever it is cut off."""

from __future__ import annotations

import io
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.crash.storages import Quick
from xla_adapters.checkpoint import MANIFEST, CheckpointStore
from xla_adapters.checkpoint.storage import ObjectStorage, Storage, join

# Saved one after the other: two steps, the second again (a swap), and one that makes the first superfluous.
STEPS = (1, 2, 2, 3)


def content(number: int) -> dict[str, bytes]:
    """The files of the save with this number."""
    return {"weights.bin": bytes([65 + number]) * 40, "state/optimizer.bin": bytes([97 + number]) * 30}


def archive(number: int) -> bytes:
    """A zip archive, as `torch.save` writes one."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as written:
        written.writestr(zipfile.ZipInfo("weights"), bytes([65 + number]) * 40)
    return stream.getvalue()


@dataclass(frozen=True)
class Form:
    """Folders on a file system, one file, or folders in an object store."""

    one_file: bool = False
    objects: bool = False

    def store(self, root: Path | str, storage: Storage) -> CheckpointStore:
        return CheckpointStore(root, keep_last=2, storage=storage)

    def name(self, number: int) -> str | None:
        return "last.ckpt" if self.one_file else None

    def save(self, store: CheckpointStore, number: int) -> None:
        """Save `number` of the history; what it writes goes through the storage too, where that is a file system."""

        def write(path: Path) -> None:
            disk = store.storage if store.storage.can_rename else Quick()
            if self.one_file:
                disk.write(str(path), archive(number))
                return
            disk.make_folder(join(str(path), "state"))
            for name, data in content(number).items():
                disk.write(join(str(path), name), data)

        store.save(STEPS[number], write, name=self.name(number), one_file=self.one_file)

    def number_at(self, path: Path) -> int | None:
        """Which save this is, to the last bit; `None` if it is none."""
        if self.one_file:
            data = path.read_bytes()
            return next((n for n in range(len(STEPS)) if _same_archive(data, n)), None)
        files = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
        files.pop(MANIFEST, None)
        return next((n for n in range(len(STEPS)) if files == content(n)), None)


def _same_archive(data: bytes, number: int) -> bool:
    # All but the length of the comment, which the seal changes, and the comment.
    expected = archive(number)
    return data[: len(expected) - 2] == expected[:-2]


def run(form: Form, root: Path | str, storage: Storage, saved: Callable[[int], None], saves: int = len(STEPS)) -> None:
    """The history; `saved(n)` is called when `n` saves have returned."""
    store = form.store(root, storage)
    for number in range(saves):
        form.save(store, number)
        saved(number + 1)


def check(form: Form, root: Path, saved: int, storage: Storage | None = None) -> None:
    """Fails unless the promises hold in a folder that was cut off after `saved` saves had returned.

    No half checkpoint has a name that others read; the last one that was saved, or the one after it, is what
    a run resumes from, without a warning; nothing temporary is left; saving goes on.
    """
    if not form.objects and root.is_dir():
        for path in root.iterdir():
            if path.name.startswith(("checkpoint-", "last")):
                assert form.number_at(path) is not None, f"{path.name} is half a checkpoint under its name"
    store = form.store(root, storage if storage is not None else Quick())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        newest = store.newest_valid()
    # Files that garbage of others has left open are none of ours.
    assert [str(warning.message) for warning in said if warning.category is not ResourceWarning] == []
    allowed = {saved - 1, saved} - {-1, len(STEPS)}
    if newest is None:
        assert saved == 0, f"{saved} saves had returned, and none is left"
    else:
        number = form.number_at(Path(newest.path))
        assert number in allowed, f"{saved} saves had returned, resumed from number {number}"
        assert newest.step == STEPS[number]
    hidden = {path.name for path in root.iterdir() if path.name.startswith((".", "_"))} if root.is_dir() else set()
    # The lock of a process that was killed stays until the next save.
    assert hidden <= {"_lock"}, f"left behind: {hidden}"
    if saved < len(STEPS):
        form.save(store, saved)
        again = store.newest_valid()
        assert again is not None
        assert form.number_at(Path(again.path)) == saved


def object_storage() -> Any:
    """Local files behind the interface of object stores."""
    from fsspec.implementations.local import LocalFileSystem

    return ObjectStorage(LocalFileSystem(auto_mkdir=True))
