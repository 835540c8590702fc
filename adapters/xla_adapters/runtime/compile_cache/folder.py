"""The folder of the compile cache: whether it can be trusted, which entries it has, and what is removed."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

# As `struct header` in plugin.c.
_HEADER = struct.Struct("=8s32sQ32s")
_MAGIC = b"XLAPROG1"
_NAME_LENGTH = 64
_HOUR = 3600.0
# What is being written: by plugin.c, or copied from a URL.
_OF_WRITERS = re.compile(r"\.[0-9a-f]{16}([0-9a-f]{48})?\.[0-9.]+\.tmp")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# Of the folder, when a process begins to use it.
DEFAULT_LIMIT = 16 << 30


# Inside the folder: where TorchTPU keeps its programs. Beside each is its checksum, which TorchTPU does not write.
TORCH_TPU = "torch_tpu"
_PROGRAM, _CHECKSUM = ".bin", ".sha256"


class FolderProblem(Exception):
    """Why a folder cannot be used, as a clause."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A compiled program in the folder.

    Attributes:
        path: of its file.
        size: in bytes.
        used: when it was last loaded or written, in seconds since 1970.
    """

    path: Path
    size: int
    used: float

    def problem(self) -> str | None:
        """Why it would not be loaded, as a clause; None if it would. Reads all of it."""
        if self.path.suffix == _PROGRAM:
            return None if _has_its_checksum(self.path) else "it is damaged, or its checksum is missing"
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            return f"it cannot be opened: {error.strerror}"
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return "it is not a regular file"
            if _may_be_others(status):
                return "another user may have written it"
            head = file.read(_HEADER.size)
            if len(head) < _HEADER.size or not head.startswith(_MAGIC):
                return "it is not a compiled program"
            _, key, size, digest = _HEADER.unpack(head)
            if key.hex() != self.path.name:
                return "it holds another program"
            if size != status.st_size - _HEADER.size:
                return "it is cut off"
            return None if hashlib.file_digest(file, "sha256").digest() == digest else "it is damaged"


def default_folder() -> Path:
    """Where programs are kept if nothing else is said.

    Raises:
        FolderProblem: the user has no home folder.
    """
    home = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # A relative one is to be ignored (XDG Base Directory Specification).
        root = Path(home) if os.path.isabs(home) else Path.home() / ".cache"
    except RuntimeError as error:
        raise FolderProblem(f"there is no home folder ({error})") from error
    return root / "xla_adapters" / "programs"


def folder_of(said: str | os.PathLike[str]) -> Path:
    """The folder of this machine that a value of `cache_dir` means; the default one if it is empty.

    Raises:
        FolderProblem: it is none.
    """
    text = os.fspath(said)
    if not text:
        return default_folder()
    if "://" in text:
        return default_folder().with_name("remote") / hashlib.sha256(text.encode()).hexdigest()[:16]
    try:
        return Path(text).expanduser().absolute()
    except (OSError, RuntimeError) as error:
        raise FolderProblem(f"{text} cannot be used: {error}") from error


def open_folder(folder: Path) -> tuple[int, bool]:
    """Opens the folder, and makes it if it is not there. What is beyond the limit is removed, if we may.

    Returns:
        A descriptor of it, and whether files can be written there.

    Raises:
        FolderProblem: it cannot be used, or others can write to it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileExistsError as error:
        raise FolderProblem(f"{folder} cannot be used: it is no folder, or a link to nothing") from error
    except OSError as error:
        raise FolderProblem(f"{folder} cannot be used: {error.strerror}") from error
    problem = distrust(folder, descriptor)
    if problem is not None:
        os.close(descriptor)
        raise FolderProblem(problem)
    writable = os.access(folder, os.W_OK | os.X_OK, effective_ids=True)
    if writable:
        # What cannot be removed stays.
        with suppress(FolderProblem):
            prune(folder, DEFAULT_LIMIT)
    return descriptor, writable


def distrust(folder: Path, descriptor: int | None = None) -> str | None:
    """Why no program in a folder is executed, as a sentence; None if it can be trusted.

    Args:
        folder: to name it.
        descriptor: of the folder, if it is open.
    """
    status = folder.stat() if descriptor is None else os.fstat(descriptor)
    if not _may_be_others(status):
        return None
    return (
        f"{folder} belongs to user {status.st_uid} and has mode {stat.S_IMODE(status.st_mode):o}: programs in a "
        "folder that others can write to are not executed. Use one of your own (chmod go-w)"
    )


def _may_be_others(status: os.stat_result) -> bool:
    return status.st_uid not in (os.geteuid(), 0) or bool(status.st_mode & _OTHERS_WRITE)


def entries(folder: Path) -> list[Entry]:
    """The programs in a folder, what was used last first.

    Raises:
        FolderProblem: it cannot be read.
    """
    found = [
        Entry(path=Path(item.path), size=status.st_size, used=status.st_mtime)
        for item, status in _files(folder)
        if _is_name(item.name)
    ]
    for path in (folder / TORCH_TPU).glob(f"*/*{_PROGRAM}"):
        # Another process may remove it meanwhile.
        with suppress(OSError):
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                found.append(Entry(path=path, size=status.st_size, used=status.st_mtime))
    return sorted(found, key=lambda entry: entry.used, reverse=True)


def prune(folder: Path, limit: int) -> list[Entry]:
    """Keeps the programs that were used last, as long as they have at most so many bytes in all, and removes others.

    What a process left behind that was killed while it wrote is removed, too, after an hour.

    Args:
        folder: of the cache.
        limit: in bytes.

    Returns:
        What was removed.

    Raises:
        FolderProblem: it cannot be read, or a program in it not removed.
    """
    for item, status in _files(folder):
        if _OF_WRITERS.fullmatch(item.name) and time.time() - status.st_mtime > _HOUR:
            _remove(Path(item.path))
    total, removed = 0, []
    for entry in entries(folder):
        if total + entry.size <= limit:
            total += entry.size
        elif entry.path.suffix == _PROGRAM or _is_program(entry.path):
            _remove(entry.path)
            if entry.path.suffix == _PROGRAM:
                _remove(entry.path.with_suffix(_CHECKSUM))
            removed.append(entry)
    return removed


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise FolderProblem(f"{path} cannot be removed: {error.strerror}") from error


# ---- folders of object stores ---------------------------------------------------------------------


class RemoteFolder:
    """The programs under a URL (`gs://`, `s3://`, whatever fsspec knows), copied to a folder of this machine and back.

    What a program is checked for when it is loaded holds for a copy, too: one that was cut off is compiled again.

    Args:
        url: of the folder.

    Attributes:
        url: of the folder.
        local: the folder of this machine.

    Raises:
        FolderProblem: no installed implementation of fsspec knows the URL, or it cannot be read.
    """

    def __init__(self, url: str) -> None:
        # Late: folders of this machine do not need it.
        import fsspec

        self.local = folder_of(url)
        self.url = url
        try:
            self._files, root = fsspec.core.url_to_fs(url)
        except _failures() as error:
            raise FolderProblem(f"{url}: {error}") from error
        self._root = root.rstrip("/")

    def fetch(self) -> int:
        """Copies what this machine does not have; returns how many programs."""
        os.close(open_folder(self.local)[0])
        names = self._names() - {entry.path.name for entry in entries(self.local)}
        for name in sorted(names):
            draft = self.local / f".{name}.{os.getpid()}.tmp"
            with self._told():
                self._files.get_file(f"{self._root}/{name}", str(draft))
                draft.chmod(0o600)
                draft.replace(self.local / name)
        return len(names)

    def publish(self) -> int:
        """Copies what the URL does not have; returns how many programs."""
        known = self._names()
        new = [
            entry.path for entry in entries(self.local) if _is_name(entry.path.name) and entry.path.name not in known
        ]
        for path in new:
            with self._told():
                self._files.makedirs(self._root, exist_ok=True)
                self._files.put_file(str(path), f"{self._root}/{path.name}")
        return len(new)

    def _names(self) -> set[str]:
        with self._told():
            if not self._files.exists(self._root):
                return set()
            self._files.invalidate_cache()
            names = (str(path).rsplit("/", 1)[-1] for path in self._files.ls(self._root, detail=False))
            return set(filter(_is_name, names))

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except _failures() as error:
            raise FolderProblem(f"{self.url}: {type(error).__name__}: {error}") from error


# What clients of object stores raise that is no OSError: by module, if it is loaded.
_OF_CLIENTS = {
    "aiohttp": ("ClientError",),
    "botocore.exceptions": ("BotoCoreError", "ClientError"),
    "gcsfs.retry": ("HttpError",),
    "google.auth.exceptions": ("GoogleAuthError",),
}


def _failures() -> tuple[type[Exception], ...]:
    found: list[type[Exception]] = [ImportError, OSError, RuntimeError, ValueError]
    for name, classes in _OF_CLIENTS.items():
        module = sys.modules.get(name)
        found += [getattr(module, cls) for cls in classes if hasattr(module, cls)]
    return tuple(found)


# ---- programs of TorchTPU -------------------------------------------------------------------------


def note_checksums(folder: Path) -> None:
    """Writes the checksums of programs that TorchTPU has written since, whole as it always does."""
    for path in (folder / TORCH_TPU).glob(f"*/*{_PROGRAM}"):
        checksum = path.with_suffix(_CHECKSUM)
        if not checksum.exists():
            draft = checksum.with_name(f".{checksum.name}.{os.getpid()}.tmp")
            draft.write_text(_checksum(path))
            draft.replace(checksum)


def remove_damaged(folder: Path) -> int:
    """Removes programs of TorchTPU that do not have their checksums: it would execute them. Returns how many.

    That of another process, which has not written the checksum yet, is removed, too, and compiled again.
    """
    damaged = [path for path in (folder / TORCH_TPU).glob(f"*/*{_PROGRAM}") if not _has_its_checksum(path)]
    for path in damaged:
        _remove(path)
        _remove(path.with_suffix(_CHECKSUM))
    return len(damaged)


def _has_its_checksum(path: Path) -> bool:
    checksum = path.with_suffix(_CHECKSUM)
    try:
        if not checksum.is_file():
            return False
        return checksum.read_text(errors="replace") == _checksum(path)
    except FileNotFoundError:
        # Another process has removed it.
        return True


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(folder: Path) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    try:
        with os.scandir(folder) as items:
            for item in items:
                # Another process may remove files meanwhile.
                if item.is_file(follow_symlinks=False) and (status := _status(item)) is not None:
                    yield item, status
    except OSError as error:
        raise FolderProblem(f"{folder} cannot be read: {error.strerror}") from error


def _status(item: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return item.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None


def _is_program(path: Path) -> bool:
    """Whether a file was written by plugin.c: other programs name files by hashes, too."""
    try:
        with path.open("rb") as file:
            # A file of zeros is what a crash of the machine may leave of one.
            return file.read(len(_MAGIC)) in (_MAGIC, bytes(len(_MAGIC)), b"")
    except OSError:
        return False


def _is_name(name: str) -> bool:
    return len(name) == _NAME_LENGTH and all(letter in "0123456789abcdef" for letter in name)
