"""Atomic commits: a checkpoint appears under its name complete, or not at all.

Where renames are atomic, a checkpoint is written below `_tmp-<token>/` and renamed (after Orbax's
AtomicRenameTemporaryPath). To replace a checkpoint, the two names are exchanged. Where the file system cannot exchange,
the old checkpoint is moved into the temporary folder, and the new one out of it; after a crash between the two, the
next process to open the store finishes this. Nothing is deleted before the new names are on disk.

Object stores have no rename. There the files are uploaded under their final names and the manifest last; files without
a manifest are not a checkpoint. A checkpoint that replaces another is named `<name>.r1`.
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

from xla_adapters.checkpoint.manifest import (
    MANIFEST,
    Checkpoint,
    Describe,
    Manifest,
    problems,
    read_manifest,
    records,
    seal_file,
    seal_folder,
)
from xla_adapters.checkpoint.storage import LocalStorage, Storage, join, remove_tree
from xla_adapters.errors import CheckpointDamagedError

# transformers uploads files next to its checkpoints to the hub, except names with this prefix.
TEMPORARY = "_tmp-"
TRASH = "_trash-"
UPLOADING = "_uploading-"
_REPLACED = "replaced"


@dataclass(kw_only=True)
class Draft:
    """A checkpoint that is being written.

    Attributes:
        name: its final name.
        path: where to write it on this machine: an existing folder, or the path of a single file.
        one_file: whether it is a single file.
        checkpoint: the result; `None` until it is committed.
    """

    name: str
    path: Path
    one_file: bool
    checkpoint: Checkpoint | None = None


class Commit(Protocol):
    """The commit protocol for one kind of storage: turns a written draft into a checkpoint, atomically."""

    def begin(self, name: str, one_file: bool) -> Draft:
        """Creates a temporary folder to write to."""

    def finish(self, draft: Draft, describe: Describe) -> Checkpoint:
        """Seals the draft, verifies it and commits it.

        Args:
            draft: the written draft.
            describe: makes the manifest from the records of the files.

        Raises:
            CheckpointError: the draft cannot be sealed, or does not read back as it was written.
            OSError: an operation of the storage failed.
        """

    def discard(self, draft: Draft) -> None:
        """Deletes the temporary files of a draft and, if it was committed, the checkpoint that it replaced."""

    def recover(self) -> None:
        """Completes or removes unfinished saves of processes that have died. The caller must hold the lock."""


def is_valid(storage: Storage, path: str) -> bool:
    """Whether a checkpoint has a manifest and all files match it."""
    try:
        manifest = read_manifest(storage, path)
    except (CheckpointDamagedError, OSError):
        return False
    return manifest is not None and not problems(storage, path, manifest)


def _verify(storage: Storage, path: str, manifest: Manifest) -> None:
    """Reads everything back and compares.

    Raises:
        CheckpointDamagedError: the storage has other content than what was written.
    """
    found = problems(storage, path, manifest)
    if not found and read_manifest(storage, path) != manifest:
        found = [f"{MANIFEST} is not what was written"]
    if found:
        raise CheckpointDamagedError(f"{path} does not read back as it was written: {'; '.join(found)}")


class RenameCommit:
    """Commits by atomic renames, on file systems.

    Args:
        storage: with atomic renames.
        root: the folder of the checkpoints.
    """

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
        # These names must be on disk before the old checkpoint can only be found through them.
        storage.fsync_folder(parent)
        storage.fsync_folder(self._root)
        storage.rename(final, join(replaced, path.rsplit("/", 1)[1]))
        storage.rename(path, final)

    def discard(self, draft: Draft) -> None:
        """See `Commit`."""
        self._finish_pending(str(draft.path.parent))

    def recover(self) -> None:
        """See `Commit`."""
        for entry in self._storage.entries(self._root):
            if entry.name.startswith(TEMPORARY):
                self._finish_pending(join(self._root, entry.name))
            elif entry.name.startswith(TRASH):
                remove_tree(self._storage, join(self._root, entry.name), first=MANIFEST)

    def _finish_pending(self, parent: str) -> None:
        """Moves valid checkpoints whose name is missing out of a temporary folder, and deletes the folder."""
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
    """Commits by uploading the manifest last, on object stores. Drafts are written to a local folder.

    Args:
        storage: without renames.
        root: the folder of the checkpoints.
        staging: makes the local folder of a draft.
    """

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
        # A single object is replaced atomically, but its predecessor is lost if the upload turns out to be damaged. So
        # a verified second copy is uploaded before.
        manifest = seal_file(LocalStorage(), str(draft.path), describe)
        for name in dict.fromkeys((spare, draft.name)):
            self._storage.upload(draft.path, join(self._root, name))
            _verify(self._storage, join(self._root, name), manifest)
        return manifest

    @contextmanager
    def _uploading(self, name: str) -> Iterator[None]:
        # The mark distinguishes an interrupted upload from a checkpoint that has lost its manifest.
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
    """Deletes a checkpoint; it is never visible half deleted."""
    path = join(root, name)
    if not storage.can_rename:
        remove_tree(storage, path, first=MANIFEST)
        return
    trash = join(root, f"{TRASH}{uuid.uuid4().hex[:8]}")
    storage.rename(path, trash)
    storage.fsync_folder(root)
    remove_tree(storage, trash, first=MANIFEST)
