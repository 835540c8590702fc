"""What an error while a checkpoint is written means: what failed, and how much room or which permission there is.

torch and safetensors write files in C++ and Rust. Their errors name a position in the file or a line of the writer,
and not always what the file system said.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from xla_adapters.errors import CheckpointError, CheckpointWriteError

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
        return f"{_size(free)} of {_size(usage.total)} are free there, less than the checkpoint needs"
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


def _size(count: int) -> str:
    value, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.{0 if units[0] == 'bytes' else 1}f} {units[0]}"
