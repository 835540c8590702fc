"""Storages that record what is asked of them, die before an operation, or let it fail."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xla_adapters.checkpoint.storage import CHANGES, LocalStorage, Storage

Operation = tuple[str, tuple[Any, ...]]


class Quick(LocalStorage):
    """Flushes nothing: what a killed process has written stays in the kernel's cache."""

    def fsync(self, path: str) -> None:
        assert os.path.isfile(path)

    def fsync_folder(self, path: str) -> None:
        assert os.path.isdir(path)


class WithoutExchange(Quick):
    """A file system that cannot swap two names, like NFS."""

    def exchange(self, one: str, other: str) -> bool:
        return False


class Watched:
    """A storage that tells each change before it is made, by the list of changes of the interface itself."""

    def __init__(self, inner: Storage, before: Callable[[str, tuple[Any, ...]], None]) -> None:
        self._inner = inner
        self._before = before
        self.can_rename = inner.can_rename

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        if name not in CHANGES:
            return attribute

        def change(*args: Any) -> Any:
            self._before(name, args)
            return attribute(*args)

        return change


def recording(inner: Storage, log: list[Operation]) -> Storage:
    """Appends every change that was made to `log`; an exchange that the file system refused is none."""

    class Recorded(Watched):
        def exchange(self, one: str, other: str) -> bool:
            swapped: bool = self._inner.exchange(one, other)
            if swapped:
                log.append(("exchange", (one, other)))
            return swapped

    return Recorded(inner, lambda name, args: log.append((name, args)))  # type: ignore[return-value]


def dying(inner: Storage, number: int, *, torn: bool = False) -> Storage:
    """Kills the process before the change with this number, counted from 0.

    Args:
        torn: half of what it was to write is written first, where it is a write.
    """
    count = 0

    def die(name: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if count == number:
            if torn and name == "write":
                inner.write(args[0], args[1][: len(args[1]) // 2], *args[2:])
            if torn and name == "upload":
                Path(args[1]).parent.mkdir(parents=True, exist_ok=True)
                Path(args[1]).write_bytes(args[0].read_bytes()[:7])
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    return Watched(inner, die)  # type: ignore[return-value]


def failing(inner: Storage, number: int, code: int) -> Storage:
    """Raises `OSError` in place of the change with this number; with a full disk, of the writes after it too."""
    count = 0

    def fail(name: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        count += 1
        if count == number + 1:
            raise OSError(code, os.strerror(code), str(args[0]))

    return Watched(inner, fail)  # type: ignore[return-value]
