"""`Storage`, the interface of all file operations; local files, object stores, and what their failures mean.

A checkpoint store accesses files only through it, so tests can record each operation, kill the process before it, or
make it fail.
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
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError

from xla_adapters.errors import CheckpointError, CheckpointWriteError, ConfigError

_CHUNK = 4 << 20
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_log = logging.getLogger(__name__)
_own_locks: dict[str, threading.Lock] = {}
_own_locks_guard = threading.Lock()
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


@dataclass(frozen=True, kw_only=True)
class StoredEntry:
    """A file, folder or link in a folder.

    Attributes:
        name: without the folder.
        is_folder: whether it is a folder.
        is_link: whether it is a symbolic link; links are not followed.
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
    """File operations on a disk or an object store. Paths are strings with `/` as separator.

    The methods listed in `CHANGES` modify something. Methods raise `OSError` when they fail.

    Attributes:
        can_rename: whether renames are atomic. Where they are not (object stores), the manifest is written last and
            marks a finished checkpoint.
    """

    can_rename: bool

    def make_folder(self, path: str) -> None:
        """Creates a folder; its parent must exist."""

    def write(self, path: str, data: bytes, start: int | None = None) -> None:
        """Creates or overwrites a file, or with `start` its bytes from there on. Call `fsync` to make it durable."""

    def upload(self, source: Path, path: str) -> None:
        """Copies a local file into the storage."""

    def fsync(self, path: str) -> None:
        """Flushes the content of a file to disk."""

    def fsync_folder(self, path: str) -> None:
        """Flushes the names in a folder to disk."""

    def rename(self, old: str, new: str) -> None:
        """Renames a file or folder atomically; a file may replace a file."""

    def exchange(self, one: str, other: str) -> bool:
        """Swaps two names atomically; returns False, without a change, if the file system does not support it."""

    def remove(self, path: str) -> None:
        """Deletes a file."""

    def remove_folder(self, path: str) -> None:
        """Deletes an empty folder."""

    def entries(self, path: str) -> list[StoredEntry]:
        """The entries of a folder, sorted by name; empty if the folder does not exist."""

    def entry(self, path: str) -> StoredEntry | None:
        """The entry at a path; `None` if it does not exist."""

    def read(self, path: str, start: int = 0) -> bytes:
        """The content of a file from byte `start` on; a negative `start` counts from the end."""

    def download(self, path: str, target: Path) -> None:
        """Copies a file out of the storage to a local path."""

    def digest(self, path: str, length: int | None = None) -> str:
        """SHA-256 of the first `length` bytes of a file (of all if not given), in hexadecimal."""

    def locked(self, folder: str) -> AbstractContextManager[None]:
        """A lock between processes and threads: only one at a time is inside the context, per folder."""


class LocalStorage:
    """Files of this machine, or of a network file system with POSIX semantics."""

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
        """See `Storage`. Also drops the file from the page cache, so that later reads come from the disk."""
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
        """See `Storage`. Supported by Linux on ext4, xfs, btrfs and tmpfs; not by NFS and many FUSE file systems."""
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

    def entries(self, path: str) -> list[StoredEntry]:
        """See `Storage`."""
        try:
            with os.scandir(path) as found:
                entries = [_local_entry(item.name, item.stat(follow_symlinks=False)) for item in found]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(entries, key=lambda entry: entry.name)

    def entry(self, path: str) -> StoredEntry | None:
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
        """See `Storage`. The kernel releases the lock of a process that dies, even if its children still run.

        The lock is on a file `_lock`, which exists only while it is held, or after its holder has died.
        """
        path = join(folder, "_lock")
        with _of_this_process(folder), ExitStack() as stack:
            while not stack.enter_context(_locked_file(path)):
                # Its holder has removed it while this process waited.
                stack.close()
            # Before it is closed: who waits for it sees that it is gone, and makes a new one.
            stack.callback(_remove_if_there, path)
            yield


def _of_this_process(folder: str) -> threading.Lock:
    """The lock between threads of this process; the kernel's lock is per process."""
    with _own_locks_guard:
        return _own_locks.setdefault(os.path.realpath(folder), threading.Lock())


@contextmanager
def _locked_file(path: str) -> Iterator[bool]:
    """Holds a lock on a file, which is made if it does not exist; whether the path is still that of the locked file."""
    with open(path, "wb") as stream:
        try:
            # Not flock: forked workers of a loader would hold that, too, and may outlive this process.
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                _log.warning("another process saves to %s: waiting for it", os.path.dirname(path))
                fcntl.lockf(stream, fcntl.LOCK_EX)
            # Some network file systems have no locks. There, only one process may write to a folder.
            elif error.errno not in (*_UNSUPPORTED, errno.ENOLCK):
                raise
        try:
            is_there = os.path.samestat(os.stat(path), os.fstat(stream.fileno()))
        except FileNotFoundError:
            is_there = False
        yield is_there


def _remove_if_there(path: str) -> None:
    # A folder that was deleted by hand, or has become read-only, is no reason for an error: nobody waits for the file.
    with suppress(OSError):
        os.unlink(path)


def _local_entry(name: str, found: os.stat_result) -> StoredEntry:
    folder, link = stat.S_ISDIR(found.st_mode), stat.S_ISLNK(found.st_mode)
    return StoredEntry(name=name, is_folder=folder, is_link=link, size=0 if folder else found.st_size)


def join(*parts: str) -> str:
    """Joins the parts of a path."""
    return "/".join(part.rstrip("/") for part in parts[:-1]) + "/" + parts[-1]


def walk(storage: Storage, folder: str, below: str = "") -> Iterator[tuple[str, StoredEntry]]:
    """All entries below a folder with their relative paths; the content of a folder comes before the folder."""
    for entry in storage.entries(folder):
        relative = below + entry.name
        if entry.is_folder:
            yield from walk(storage, join(folder, entry.name), relative + "/")
        yield relative, entry


def remove_tree(storage: Storage, path: str, *, first: str | None = None) -> None:
    """Deletes a file, or a folder with its content.

    Args:
        storage: the storage.
        path: of the file or folder; nothing happens if it does not exist.
        first: the file to delete first, relative to the folder, if it exists.
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


class ObjectStorage:
    """Implements `Storage` with an fsspec file system.

    Object stores have no locks: only one process may write to a folder at a time.

    Args:
        files: the `fsspec.AbstractFileSystem`.
    """

    can_rename = False

    def __init__(self, files: Any) -> None:
        self._files = files

    def make_folder(self, path: str) -> None:
        """See `Storage`. Does nothing: a folder exists as soon as it has an object."""

    def write(self, path: str, data: bytes, start: int | None = None) -> None:
        """See `Storage`."""
        if start is not None:
            raise OSError(errno.EOPNOTSUPP, "objects cannot be changed", path)
        self._files.pipe_file(path, data)

    def upload(self, source: Path, path: str) -> None:
        """See `Storage`."""
        self._files.put_file(str(source), path)

    def fsync(self, path: str) -> None:
        """See `Storage`. An object that was uploaded is durable."""

    def fsync_folder(self, path: str) -> None:
        """See `Storage`. An object that was uploaded is durable."""

    def rename(self, old: str, new: str) -> None:
        """See `Storage`. Always raises: it would be a copy and a deletion."""
        raise OSError(errno.EOPNOTSUPP, "object stores cannot rename", old)

    def exchange(self, one: str, other: str) -> bool:
        """See `Storage`."""
        return False

    def remove(self, path: str) -> None:
        """See `Storage`."""
        self._files.rm_file(path)

    def remove_folder(self, path: str) -> None:
        """See `Storage`. Usually a folder vanishes with its last object; some stores keep an empty folder."""
        if self._files.isdir(path):
            self._files.rmdir(path)

    def entries(self, path: str) -> list[StoredEntry]:
        """See `Storage`."""
        self._files.invalidate_cache()
        try:
            found = self._files.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        # Some stores list the folder itself among its entries.
        inside = [item for item in found if item["name"].rstrip("/") != path.strip("/") and item["name"] != path]
        return sorted((_object_entry(item) for item in inside), key=lambda entry: entry.name)

    def entry(self, path: str) -> StoredEntry | None:
        """See `Storage`."""
        self._files.invalidate_cache()
        try:
            return _object_entry(self._files.info(path))
        except FileNotFoundError:
            return None

    def read(self, path: str, start: int = 0) -> bytes:
        """See `Storage`."""
        size = int(self._files.info(path)["size"])
        first = start if start >= 0 else max(0, size + start)
        data: bytes = self._files.cat_file(path, start=first, end=size)
        return data

    def download(self, path: str, target: Path) -> None:
        """See `Storage`."""
        self._files.get_file(path, str(target))

    def digest(self, path: str, length: int | None = None) -> str:
        """See `Storage`."""
        found = hashlib.sha256()
        with self._files.open(path, "rb") as stream:
            left = stream.size if length is None else length
            while left > 0 and (chunk := stream.read(min(_CHUNK, left))):
                found.update(chunk)
                left -= len(chunk)
        return found.hexdigest()

    @contextmanager
    def locked(self, folder: str) -> Iterator[None]:
        """See `Storage`. Does nothing: there are no locks."""
        yield


def _object_entry(item: dict[str, Any]) -> StoredEntry:
    folder = item["type"] == "directory"
    name = item["name"].rstrip("/").rsplit("/", 1)[-1]
    return StoredEntry(name=name, is_folder=folder, is_link=False, size=0 if folder else int(item["size"]))


def storage_of(root: str | os.PathLike[str]) -> tuple[Storage, str]:
    """The storage for a path or URL, and the path within that storage.

    Raises:
        ConfigError: no installed fsspec implementation supports this URL.
    """
    text = os.fspath(root)
    if "://" not in text:
        return LocalStorage(), os.path.abspath(text)
    # Imported late: local folders do not need it.
    import fsspec

    try:
        files, path = fsspec.core.url_to_fs(text)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{text}: {error}") from error
    if "file" in files.protocol or "local" in files.protocol:
        return LocalStorage(), os.path.abspath(path)
    return ObjectStorage(files), path.rstrip("/")


# Parts of the messages of torch's writer of zip archives.
_OF_TORCH = ("inline_container", "PytorchStreamWriter", "file write failed")
# Parts of safetensors' messages that carry an error of the file system.
_OF_SAFETENSORS = ("I/O error", "os error")
# With less room than this, a write that failed without a reason failed for lack of room.
_LITTLE = 1 << 20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM)


def is_failed_write(error: BaseException) -> bool:
    """Whether an error means that a file could not be written. Errors that say so by themselves do not count."""
    if isinstance(error, CheckpointError):
        return False
    if isinstance(error, OSError):
        return True
    if isinstance(error, SafetensorError):
        return any(part in str(error) for part in _OF_SAFETENSORS)
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _OF_TORCH)


def cause(error: BaseException, folder: str | os.PathLike[str]) -> str:
    """What failed, in words. To be called while the half-written files are still there.

    Args:
        error: for which `is_failed_write` holds.
        folder: that was written to; it need not exist.
    """
    if isinstance(error, (OSError, SafetensorError)):
        return str(error)
    existing = _existing(folder)
    if existing is not None and shutil.disk_usage(existing).free < _LITTLE:
        return os.strerror(errno.ENOSPC)
    if existing is not None and not os.access(existing, os.W_OK):
        return os.strerror(errno.EACCES)
    return "a file could not be written to its end, and torch does not say why: a quota, or an error of the disk"


def room(said: str, folder: str | os.PathLike[str], draft: Path | None = None) -> str:
    """A sentence on the room in a folder, or on who may write to it; empty if neither is the cause.

    Args:
        said: what `cause` returned.
        folder: that was written to.
        draft: the half-written file or folder, whose room counts as free.
    """
    existing = _existing(folder)
    if existing is None:
        return ""
    if any(os.strerror(code) in said for code in _NO_ROOM):
        usage = shutil.disk_usage(existing)
        free = usage.free + (0 if draft is None else _used(draft))
        return f"{in_words(free)} of {in_words(usage.total)} are free there, less than the checkpoint needs"
    if any(os.strerror(code) in said for code in _FORBIDDEN):
        found = existing.stat()
        return (
            f"{existing} has the mode {found.st_mode & 0o7777:o} and belongs to user {found.st_uid}; this process runs "
            f"as user {os.geteuid()}"
        )
    return ""


def kept(names: Sequence[str]) -> str:
    """A sentence on the checkpoints that are still there."""
    if not names:
        return "there is no other checkpoint in the folder"
    return f"those that were there still are: {', '.join(names)}"


@contextmanager
def naming_failed_writes(what: str, folder: str | os.PathLike[str]) -> Iterator[None]:
    """Around code that writes files by itself, without a `CheckpointStore`.

    Args:
        what: is written, to begin the message.
        folder: that is written to.

    Raises:
        CheckpointWriteError: a file could not be written.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        # HTTP libraries raise OSErrors without a number.
        if not is_failed_write(error) or (isinstance(error, OSError) and error.errno is None):
            raise
        said = cause(error, folder)
        sentences = [f"{what} was not saved to {os.fspath(folder)}: {said}", room(said, folder)]
        sentences.append("files that are there already may be incomplete")
        raise CheckpointWriteError("; ".join(filter(None, sentences))) from error


def _existing(folder: str | os.PathLike[str]) -> Path | None:
    """The folder, or the nearest one above it that exists; None for one in an object store."""
    if "://" in os.fspath(folder):
        return None
    path = Path(folder).absolute()
    return next((one for one in (path, *path.parents) if one.is_dir()), None)


def _used(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else (path,)
    return sum(file.stat().st_size for file in files if file.is_file())


def in_words(count: int) -> str:
    """A number of bytes with a binary unit."""
    value, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.{0 if units[0] == 'bytes' else 1}f} {units[0]}"
