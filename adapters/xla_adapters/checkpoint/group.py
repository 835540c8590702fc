"""`Group`, the processes that save together, and `Watchdog`, which ends what waits too long for one of them."""

from __future__ import annotations

import ctypes
import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TextIO

from xla_adapters.errors import StallError

STALLED_EXIT_CODE = 1
"""Exit status of a process that did not react to the error (set by faulthandler)."""


class _Expired(BaseException):
    """Raised asynchronously in the thread that hangs; `watch` turns it into a `StallError`."""


class Watchdog:
    """Ends a step, a save or a barrier that takes longer than a deadline.

    At the deadline the stacks of all threads are printed, and an error is raised in the watched thread. Python code
    gets it at once, native code (a collective that waits for a dead peer) only when it returns. If the block has not
    ended after another `grace`, the stacks are printed again and the process is ended, even if the GIL is held.

    Args:
        deadline: for each `watch` block; `None` disables the watchdog.
        grace: time from the error to the end of the process.
    """

    def __init__(self, deadline: timedelta | None, *, grace: timedelta = timedelta(seconds=30)) -> None:
        self._deadline = deadline
        self._grace = grace

    @contextmanager
    def watch(self, what: str) -> Iterator[None]:
        """Watches the body of a `with` block; blocks may be nested, or run in several threads.

        Args:
            what: what the block does, for the message.

        Raises:
            StallError: the block took too long.
        """
        if self._deadline is None:
            yield
            return
        seconds, thread = self._deadline.total_seconds(), threading.get_ident()
        done, lock, expired = threading.Event(), threading.Lock(), False
        message = (
            f"{what} did not end within {seconds:g} s. The stacks of all threads are on stderr; a collective "
            "or a barrier there waits for another process, a read or write for the storage"
        )

        def guard() -> None:
            nonlocal expired
            if done.wait(seconds):
                return
            with lock:
                if not done.is_set():
                    expired = True
                    faulthandler.dump_traceback(file=_stderr(), all_threads=True)
                    print(f"xla-adapters: {message}", file=_stderr(), flush=True)
                    _raise_in(thread, _Expired)

        watcher = threading.Thread(target=guard, name=f"watchdog of {what}", daemon=True)
        try:
            with _last_resort.armed(seconds + self._grace.total_seconds()):
                watcher.start()
                try:
                    yield
                finally:
                    with lock:
                        done.set()
                        if expired:
                            # Cancels the error if it has not been raised yet: the block it was meant for is over.
                            _raise_in(thread, None)
        except _Expired:
            raise StallError(message) from None
        finally:
            done.set()
            watcher.join()


class _LastResort:
    """Ends the process at the earliest of several deadlines (faulthandler supports a single one)."""

    def __init__(self) -> None:
        self._moments: list[float] = []
        self._lock = threading.Lock()

    @contextmanager
    def armed(self, seconds: float) -> Iterator[None]:
        moment = time.monotonic() + seconds
        self._change(self._moments.append, moment)
        try:
            yield
        finally:
            self._change(self._moments.remove, moment)

    def _change(self, change: Callable[[float], None], moment: float) -> None:
        with self._lock:
            change(moment)
            if self._moments:
                # faulthandler needs a time in the future.
                left = max(0.001, min(self._moments) - time.monotonic())
                faulthandler.dump_traceback_later(left, exit=True, file=_stderr())
            else:
                faulthandler.cancel_dump_traceback_later()


_last_resort = _LastResort()


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    raised = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


def _stderr() -> TextIO:
    """The original stderr: faulthandler needs a file descriptor, which a replacement may not have."""
    return sys.__stderr__ if sys.__stderr__ is not None else sys.stderr


class Group(Protocol):
    """The processes of one run, and how they exchange values.

    Attributes:
        rank: of this process, from 0.
        size: number of processes.
    """

    rank: int
    size: int

    def gather(self, value: Any) -> list[Any]:
        """All-gather: the values of all ranks, by rank. All ranks must call it."""


class OneProcess:
    """A run in a single process, with any number of devices."""

    rank = 0
    size = 1

    def gather(self, value: Any) -> list[Any]:
        """See `Group`."""
        return [value]


class TorchGroup:
    """The processes of a `torch.distributed` group that can send objects (gloo).

    Args:
        group: the default group if not given. Asynchronous saving needs a group that nothing else uses.
        watchdog: raises if another process does not arrive in time.
    """

    def __init__(self, group: Any = None, *, watchdog: Watchdog | None = None) -> None:
        import torch.distributed

        self._distributed = torch.distributed
        self._group = group
        self._watchdog = watchdog if watchdog is not None else Watchdog(None)
        self.rank = torch.distributed.get_rank(group)
        self.size = torch.distributed.get_world_size(group)

    def gather(self, value: Any) -> list[Any]:
        """See `Group`.

        Raises:
            StallError: another process did not arrive before the watchdog's deadline.
        """
        values: list[Any] = [None] * self.size
        with self._watchdog.watch(f"the barrier of rank {self.rank} with {self.size - 1} others"):
            self._distributed.all_gather_object(values, value, group=self._group)
        return values
