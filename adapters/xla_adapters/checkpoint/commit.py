"""How a finished checkpoint comes to its name: at one instant, or not at all.

Where renames are atomic, a checkpoint is written below `_tmp-<token>/` and renamed (after Orbax's
AtomicRenameTemporaryPath). One that takes the place of another of its name is exchanged with it. Where the
file system cannot exchange, the old one is moved aside and the new one in; whoever opens the store after a
crash between the two completes it. Nothing is deleted before the names are durable.

Object stores have no rename. There the files are uploaded under their names and the manifest last; without
it they are no checkpoint. One that takes the place of another gets a name of its own, `<name>.r1`.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from xla_adapters.checkpoint.manifest import MANIFEST, Checkpoint, Manifest
from xla_adapters.checkpoint.sealing import (
    Describe,
    problems,
    read_manifest,
    records,
    seal_file,
    seal_folder,
)
from xla_adapters.checkpoint.storage import LocalStorage, Storage, join, remove_tree
from xla_adapters.errors import CheckpointDamagedError

# transformers uploads what lies beside its checkpoints to the hub, but for names that begin like this.
TEMPORARY = "_tmp-"
TRASH = "_trash-"
UPLOADING = "_uploading-"
_REPLACED = "replaced"


@dataclass(kw_only=True)
class Draft:
    """A checkpoint that is being written.

    Attributes:
        name: what it will be called.
        path: where to write it, on this machine: a folder that exists, or the path of one file.
        one_file: which of them.
        checkpoint: what became of it; `None` until it is committed.
    """

    name: str
    path: Path
    one_file: bool
    checkpoint: Checkpoint | None = None


class Commit(Protocol):
    """How one kind of storage brings a draft to its name."""

    def begin(self, name: str, one_file: bool) -> Draft:
        """A place to write to."""

    def finish(self, draft: Draft, describe: Describe) -> Checkpoint:
        """Seals, verifies and commits.

        Raises:
            CheckpointError: it cannot be sealed, or does not read back as it was written.
            OSError: the storage refuses.
        """

    def discard(self, draft: Draft) -> None:
        """Deletes the draft; of a committed one what is left of it, and its predecessor."""

    def recover(self) -> None:
        """Completes or removes what processes that are no more have left behind. Only under the lock."""


def is_valid(storage: Storage, path: str) -> bool:
    """Whether a checkpoint is what was written, to the last bit."""
    try:
        manifest = read_manifest(storage, path)
    except (CheckpointDamagedError, OSError):
        return False
    return manifest is not None and not problems(storage, path, manifest)


def _verify(storage: Storage, path: str, manifest: Manifest) -> None:
    """Reads everything back.

    Raises:
        CheckpointDamagedError: the storage does not hold what was written.
    """
    found = problems(storage, path, manifest)
    if not found and read_manifest(storage, path) != manifest:
        found = [f"{MANIFEST} is not what was written"]
    if found:
        raise CheckpointDamagedError(f"{path} does not read back as it was written: {'; '.join(found)}")


class RenameCommit:
    """For file systems."""

    def __init__(self, storage: Storage, root: str) -> None:
        self._storage = storage
        self._root = root

    def begin(self, name: str, one_file: bool) -> Draft:
        """See `Commit`."""
        parent = join(self._root, f"{TEMPORARY}{uuid.uuid4().hex[:8]}")
        self._storage.make_folder(parent)
        path = join(parent, name)
        if not one_file:
            self._storage.make_folder(path)
        return Draft(name=name, path=Path(path), one_file=one_file)

    def finish(self, draft: Draft, describe: Describe) -> Checkpoint:
        """See `Commit`."""
        storage, path, final = self._storage, str(draft.path), join(self._root, draft.name)
        manifest = (seal_file if draft.one_file else seal_folder)(storage, path, describe)
        _verify(storage, path, manifest)
        present = storage.entry(final)
        if present is None or (draft.one_file and not present.is_folder):
            storage.rename(path, final)
        elif not storage.exchange(path, final):
            self._move_aside_and_in(path, final)
        storage.fsync_folder(self._root)
        return Checkpoint(path=final, manifest=manifest)

    def _move_aside_and_in(self, path: str, final: str) -> None:
        storage, parent = self._storage, path.rsplit("/", 1)[0]
        replaced = join(parent, _REPLACED)
        storage.make_folder(replaced)
        # From here on the old one is only found through these names.
        storage.fsync_folder(parent)
        storage.fsync_folder(self._root)
        storage.rename(final, join(replaced, path.rsplit("/", 1)[1]))
        storage.rename(path, final)

    def discard(self, draft: Draft) -> None:
        """See `Commit`."""
        self._settle(str(draft.path.parent))

    def recover(self) -> None:
        """See `Commit`."""
        for entry in self._storage.entries(self._root):
            if entry.name.startswith(TEMPORARY):
                self._settle(join(self._root, entry.name))
            elif entry.name.startswith(TRASH):
                remove_tree(self._storage, join(self._root, entry.name), first=MANIFEST)

    def _settle(self, parent: str) -> None:
        """Brings home what a temporary folder holds of a name that is missing, and removes the rest."""
        storage = self._storage
        for folder in (parent, join(parent, _REPLACED)):
            for entry in storage.entries(folder):
                final = join(self._root, entry.name)
                if (
                    entry.name != _REPLACED
                    and storage.entry(final) is None
                    and is_valid(storage, join(folder, entry.name))
                ):
                    storage.rename(join(folder, entry.name), final)
                    storage.fsync_folder(self._root)
        remove_tree(storage, parent)


class MarkerCommit:
    """For object stores: the draft is written to a folder of this machine and uploaded."""

    def __init__(self, storage: Storage, root: str, staging: Callable[[], str] = tempfile.mkdtemp) -> None:
        self._storage = storage
        self._root = root
        self._staging = staging

    def begin(self, name: str, one_file: bool) -> Draft:
        """See `Commit`."""
        path = Path(self._staging()) / name
        if not one_file:
            path.mkdir()
        return Draft(name=name, path=path, one_file=one_file)

    def finish(self, draft: Draft, describe: Describe) -> Checkpoint:
        """See `Commit`."""
        name = self._free_name(draft.name)
        if draft.one_file:
            manifest = self._finish_file(draft, name, describe)
            name = draft.name
        else:
            manifest = self._finish_folder(draft, name, describe)
        return Checkpoint(path=join(self._root, name), manifest=manifest)

    def _finish_folder(self, draft: Draft, name: str, describe: Describe) -> Manifest:
        storage, final = self._storage, join(self._root, name)
        manifest = describe(records(LocalStorage(), str(draft.path)))
        with self._uploading(name):
            for relative in manifest.files:
                storage.upload(draft.path / relative, join(final, relative))
            found = problems(storage, final, manifest)
            if found:
                raise CheckpointDamagedError(f"{final} does not read back as uploaded: {'; '.join(found)}")
            storage.write(join(final, MANIFEST), manifest.encode())
        _verify(storage, final, manifest)
        return manifest

    def _finish_file(self, draft: Draft, spare: str, describe: Describe) -> Manifest:
        # One object appears at once, or not at all. Its predecessor goes with that, so a second copy is there before.
        manifest = seal_file(LocalStorage(), str(draft.path), describe)
        for name in dict.fromkeys((spare, draft.name)):
            self._storage.upload(draft.path, join(self._root, name))
            _verify(self._storage, join(self._root, name), manifest)
        return manifest

    @contextmanager
    def _uploading(self, name: str) -> Iterator[None]:
        # Tells what is left of an upload from a checkpoint whose manifest got lost on the way here.
        mark = join(self._root, UPLOADING + name)
        self._storage.write(mark, b"")
        yield
        self._storage.remove(mark)

    def _revisions(self, name: str) -> list[str]:
        return [
            entry.name
            for entry in self._storage.entries(self._root)
            if entry.name == name or (entry.name.startswith(name + ".r") and entry.name[len(name) + 2 :].isdigit())
        ]

    def _free_name(self, name: str) -> str:
        taken = self._revisions(name)
        if not taken:
            return name
        return f"{name}.r{1 + max(int(other[len(name) + 2 :] or 0) for other in taken)}"

    def discard(self, draft: Draft) -> None:
        """See `Commit`."""
        shutil.rmtree(draft.path.parent, ignore_errors=True)
        if draft.checkpoint is not None:
            for older in self._revisions(draft.name):
                if older != draft.checkpoint.name:
                    remove_tree(self._storage, join(self._root, older), first=MANIFEST)

    def recover(self) -> None:
        """See `Commit`."""
        for entry in self._storage.entries(self._root):
            if entry.name.startswith(UPLOADING):
                upload = join(self._root, entry.name.removeprefix(UPLOADING))
                if not is_valid(self._storage, upload):
                    remove_tree(self._storage, upload)
                self._storage.remove(join(self._root, entry.name))


def remove_checkpoint(storage: Storage, root: str, name: str) -> None:
    """Deletes a checkpoint, such that at no instant half of it is seen under its name."""
    path = join(root, name)
    if not storage.can_rename:
        remove_tree(storage, path, first=MANIFEST)
        return
    trash = join(root, f"{TRASH}{uuid.uuid4().hex[:8]}")
    storage.rename(path, trash)
    storage.fsync_folder(root)
    remove_tree(storage, trash, first=MANIFEST)
