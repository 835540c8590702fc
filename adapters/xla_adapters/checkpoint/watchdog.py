"""`Watchdog`: what takes too long ends with an error that shows where it hangs."""

from __future__ import annotations

import ctypes
import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TextIO

from xla_adapters.errors import StallError

STALLED_EXIT_CODE = 1
"""Of a process that did not react to the error; it is faulthandler's own."""


class _Expired(BaseException):
    """Raised in the thread that hangs, wherever it is; `watch` makes a `StallError` of it."""


class Watchdog:
    """Ends a step, a save or a barrier that takes longer than a deadline.

    At the deadline the stacks of all threads are printed and an error is raised in the thread that is watched.
    Python code sees it at once, a call into native code (a collective that waits for a dead peer) only when it
    returns. After `grace` more the process is ended, with the stacks once more, even if the interpreter's lock
    is held.

    Args:
        deadline: for each stretch that is watched; `None` watches nothing.
        grace: from the error to the end of the process.
    """

    def __init__(self, deadline: timedelta | None, *, grace: timedelta = timedelta(seconds=30)) -> None:
        self._deadline = deadline
        self._grace = grace

    @contextmanager
    def watch(self, what: str) -> Iterator[None]:
        """Watches the body of a `with` block; blocks may be nested, or run in several threads.

        Args:
            what: what is done there, for the message.

        Raises:
            StallError: it took too long.
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
                            # The error may still be on its way, behind the block that it was meant for.
                            _raise_in(thread, None)
        except _Expired:
            raise StallError(message) from None
        finally:
            done.set()
            watcher.join()


class _LastResort:
    """Ends the process when the soonest of several moments comes. faulthandler can wait for one only."""

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
                # It must be in the future; one that has passed was let pass by whoever it was for.
                left = max(0.001, min(self._moments) - time.monotonic())
                faulthandler.dump_traceback_later(left, exit=True, file=_stderr())
            else:
                faulthandler.cancel_dump_traceback_later()


_last_resort = _LastResort()


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    raised = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


def _stderr() -> TextIO:
    """The one that has a descriptor: whatever stands in its place may have none."""
    return sys.__stderr__ if sys.__stderr__ is not None else sys.stderr
