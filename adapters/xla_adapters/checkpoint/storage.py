"""The narrow interface of storage operations, and local files behind it.

Everything a store does to a disk goes through here, so that tests can record each operation, kill
the process before it, or let it fail.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_CHUNK = 4 << 20
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_log = logging.getLogger(__name__)
_own_locks: dict[str, threading.Lock] = {}
_own_locks_guard = threading.Lock()
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One name in a folder.

    Attributes:
        is_link: a link, to whatever; nothing behind it is looked at.
        size: in bytes; 0 for a folder.
    """

    name: str
    is_folder: bool
    is_link: bool
    size: int


CHANGES = (
    "make_folder",
    "write",
    "upload",
    "fsync",
    "fsync_folder",
    "rename",
    "exchange",
    "remove",
    "remove_folder",
)


class Storage(Protocol):
    """What a store asks of a disk or of an object store. Paths are strings with `/` between the names.

    The methods named in `CHANGES` change something; all of them raise `OSError` when they cannot.

    Attributes:
        can_rename: whether a rename is atomic. Where it is not (object stores), the manifest is written last and
            is itself the mark of a finished checkpoint.
    """

    can_rename: bool

    def make_folder(self, path: str) -> None:
        """Makes a folder; its parent exists."""

    def write(self, path: str, data: bytes, start: int | None = None) -> None:
        """Makes or overwrites a file; with `start`, only from this byte on. It is durable only after `fsync`."""

    def upload(self, source: Path, path: str) -> None:
        """Copies a local file here."""

    def fsync(self, path: str) -> None:
        """Makes the content of a file durable."""

    def fsync_folder(self, path: str) -> None:
        """Makes the names in a folder durable."""

    def rename(self, old: str, new: str) -> None:
        """Moves a file or folder atomically; a file may take the place of a file."""

    def exchange(self, one: str, other: str) -> bool:
        """Swaps two names atomically; False, and nothing happened, where the file system cannot."""

    def remove(self, path: str) -> None:
        """Deletes a file."""

    def remove_folder(self, path: str) -> None:
        """Deletes an empty folder."""

    def entries(self, path: str) -> list[Entry]:
        """What is in a folder, by name; empty if there is no such folder."""

    def entry(self, path: str) -> Entry | None:
        """What is at a path, `None` if nothing is."""

    def read(self, path: str, start: int = 0) -> bytes:
        """The content of a file from this byte on; a negative `start` counts from the end."""

    def download(self, path: str, target: Path) -> None:
        """Copies a file from here to this machine."""

    def digest(self, path: str, length: int | None = None) -> str:
        """SHA-256 of the first `length` bytes of a file, of all if not given, in hexadecimal digits."""

    def locked(self, folder: str) -> AbstractContextManager[None]:
        """Only one process at a time is inside, for each folder."""


class LocalStorage:
    """Files of this machine, or of a network file system with the semantics of POSIX."""

    can_rename = True

    def make_folder(self, path: str) -> None:
        """See `Storage`."""
        os.mkdir(path)

    def write(self, path: str, data: bytes, start: int | None = None) -> None:
        """See `Storage`."""
        with open(path, "wb" if start is None else "r+b") as stream:
            stream.seek(start or 0)
            stream.write(data)

    def upload(self, source: Path, path: str) -> None:
        """See `Storage`."""
        shutil.copyfile(source, path)

    def fsync(self, path: str) -> None:
        """See `Storage`. What is read afterwards comes from the disk, not from the cache of what was written."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)

    def fsync_folder(self, path: str) -> None:
        """See `Storage`."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: str, new: str) -> None:
        """See `Storage`."""
        os.rename(old, new)

    def exchange(self, one: str, other: str) -> bool:
        """See `Storage`. Linux has it on ext4, xfs, btrfs and tmpfs; NFS and many FUSE file systems do not."""
        renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if renameat2 is None:
            return False
        if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
            return True
        code = ctypes.get_errno()
        if code in _UNSUPPORTED:
            return False
        raise OSError(code, os.strerror(code), one, None, other)

    def remove(self, path: str) -> None:
        """See `Storage`."""
        os.unlink(path)

    def remove_folder(self, path: str) -> None:
        """See `Storage`."""
        os.rmdir(path)

    def entries(self, path: str) -> list[Entry]:
        """See `Storage`."""
        try:
            with os.scandir(path) as found:
                entries = [_local_entry(item.name, item.stat(follow_symlinks=False)) for item in found]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(entries, key=lambda entry: entry.name)

    def entry(self, path: str) -> Entry | None:
        """See `Storage`."""
        try:
            found = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return _local_entry(os.path.basename(path), found)

    def read(self, path: str, start: int = 0) -> bytes:
        """See `Storage`."""
        with open(path, "rb") as stream:
            stream.seek(start if start >= 0 else max(0, os.fstat(stream.fileno()).st_size + start))
            return stream.read()

    def download(self, path: str, target: Path) -> None:
        """See `Storage`."""
        shutil.copyfile(path, target)

    def digest(self, path: str, length: int | None = None) -> str:
        """See `Storage`."""
        found = hashlib.sha256()
        buffer = memoryview(bytearray(_CHUNK))
        left = os.path.getsize(path) if length is None else length
        with open(path, "rb", buffering=0) as stream:
            while left > 0 and (count := stream.readinto(buffer[: min(_CHUNK, left)])):
                found.update(buffer[:count])
                left -= count
        return found.hexdigest()

    @contextmanager
    def locked(self, folder: str) -> Iterator[None]:
        """See `Storage`. The kernel frees the lock of a process that dies, even if it leaves children behind."""
        with _of_this_process(folder), open(join(folder, "_lock"), "wb") as stream:
            try:
                # Not flock: a forked worker of a loader would hold that, too, and outlive its parent with it.
                fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    _log.warning("another process saves to %s: waiting for it", folder)
                    fcntl.lockf(stream, fcntl.LOCK_EX)
                # Some network file systems have no locks: there one process writes to a folder, as in an object store.
                elif error.errno not in (*_UNSUPPORTED, errno.ENOLCK):
                    raise
            yield


def _of_this_process(folder: str) -> threading.Lock:
    """The lock for its own threads, which the kernel's does not keep apart."""
    with _own_locks_guard:
        return _own_locks.setdefault(os.path.realpath(folder), threading.Lock())


def _local_entry(name: str, found: os.stat_result) -> Entry:
    folder, link = stat.S_ISDIR(found.st_mode), stat.S_ISLNK(found.st_mode)
    return Entry(name=name, is_folder=folder, is_link=link, size=0 if folder else found.st_size)


def join(*parts: str) -> str:
    """A path of these parts."""
    return "/".join(part.rstrip("/") for part in parts[:-1]) + "/" + parts[-1]


def walk(storage: Storage, folder: str, below: str = "") -> Iterator[tuple[str, Entry]]:
    """Everything below a folder, by its path relative to it; what a folder holds comes before the folder."""
    for entry in storage.entries(folder):
        relative = below + entry.name
        if entry.is_folder:
            yield from walk(storage, join(folder, entry.name), relative + "/")
        yield relative, entry


def remove_tree(storage: Storage, path: str, *, first: str | None = None) -> None:
    """Deletes a file, or a folder with all in it.

    Args:
        first: the file to begin with, relative to the folder, if it is there.
    """
    entry = storage.entry(path)
    if entry is None:
        return
    if not entry.is_folder:
        storage.remove(path)
        return
    content = list(walk(storage, path))
    content.sort(key=lambda item: item[0] != first)
    for relative, inner in content:
        if inner.is_folder:
            storage.remove_folder(join(path, relative))
        else:
            storage.remove(join(path, relative))
    storage.remove_folder(path)
