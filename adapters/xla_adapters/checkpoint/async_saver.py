"""`AsyncSaver`: the training loop waits for the copy to the host, and a thread writes."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from xla_adapters.checkpoint.manifest import Checkpoint
from xla_adapters.checkpoint.snapshot import snapshot
from xla_adapters.checkpoint.store import CheckpointStore, refuse_inside_step

_State = TypeVar("_State")
SAVE_FAILED_EXIT_CODE = 74
"""Of a process whose last save failed with nobody left to tell (EX_IOERR of sysexits.h)."""


class AsyncSaver:
    """Saves to a store in the background, one checkpoint at a time.

    What goes wrong there is raised by the next `save`, by `wait` and by the end of the `with` block. If none of
    them comes, the process prints it at its end and has exit status `SAVE_FAILED_EXIT_CODE`.

    Args:
        store: where to. With several processes its group must be one that nothing else uses.

    Attributes:
        store: of the next save; whoever sets it waits first.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None
        self._saved: Checkpoint | None = None
        _savers.add(self)

    @property
    def in_flight(self) -> bool:
        """Whether a save is being written."""
        return self._thread is not None and self._thread.is_alive()

    def save(
        self,
        step: int,
        state: _State,
        write: Callable[[_State, Path], None],
        *,
        take: Callable[[_State], _State] = snapshot,
        name: str | None = None,
        one_file: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Copies the state, and returns while it is written. Waits for the save before, if it is not done.

        Args:
            step, name, one_file, settings: as for `CheckpointStore.save`.
            state: what to save.
            write: writes the copy of the state to a folder (or to a file); runs in the thread.
            take: makes the copy.

        Raises:
            CheckpointWriteError: the save before failed; this one was not begun.
            CheckpointSaveError: a step is open.
        """
        refuse_inside_step(step)
        self.wait()
        copied = take(state)

        def run() -> None:
            try:
                self._saved = self.store.save(
                    step, lambda path: write(copied, path), name=name, one_file=one_file, settings=settings
                )
            except BaseException as error:  # noqa: BLE001 (whatever it is, it is raised where somebody can hear it)
                self._failed = error

        self._thread = threading.Thread(target=run, name=f"checkpoint of step {step}")
        self._thread.start()

    def wait(self) -> Checkpoint | None:
        """Waits until nothing is being written; returns the last checkpoint that was.

        Raises:
            CheckpointWriteError, or what `write` raised: the save failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed
        return self._saved

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
            return
        # The error of the body is the one to see; that of the save is printed.
        if self._thread is not None:
            self._thread.join()
        if self._failed is not None:
            _print(self._failed)
            self._failed = None


_savers: weakref.WeakSet[AsyncSaver] = weakref.WeakSet()


def _print(error: BaseException) -> None:
    print("xla-adapters: a checkpoint was not saved:", file=sys.stderr)
    traceback.print_exception(error)


def _finish_all() -> None:
    for saver in list(_savers):
        if saver._thread is not None:
            saver._thread.join()


# Before the interpreter joins threads itself: by then none can start another, nor use a pool of them, and writers do.
# concurrent.futures, which has its pools ended in this way, is imported before (by the store), so it comes after.
threading._register_atexit(_finish_all)  # type: ignore[attr-defined]


@atexit.register
def _at_exit() -> None:
    unheard = [saver._failed for saver in _savers if saver._failed is not None]
    for error in unheard:
        _print(error)
    if unheard:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        # An exception in a function that runs at exit does not change the exit status.
        os._exit(SAVE_FAILED_EXIT_CODE)
