"""`ObjectStorage`: object stores (S3, GCS, ...) through fsspec. They cannot rename; uploads of an object are atomic."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xla_adapters.checkpoint.storage import Entry, LocalStorage, Storage
from xla_adapters.errors import ConfigError

_CHUNK = 4 << 20


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

    def entries(self, path: str) -> list[Entry]:
        """See `Storage`."""
        self._files.invalidate_cache()
        try:
            found = self._files.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        # Some stores list the folder itself among its entries.
        inside = [item for item in found if item["name"].rstrip("/") != path.strip("/") and item["name"] != path]
        return sorted((_entry(item) for item in inside), key=lambda entry: entry.name)

    def entry(self, path: str) -> Entry | None:
        """See `Storage`."""
        self._files.invalidate_cache()
        try:
            return _entry(self._files.info(path))
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


def _entry(item: dict[str, Any]) -> Entry:
    folder = item["type"] == "directory"
    name = item["name"].rstrip("/").rsplit("/", 1)[-1]
    return Entry(name=name, is_folder=folder, is_link=False, size=0 if folder else int(item["size"]))


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
