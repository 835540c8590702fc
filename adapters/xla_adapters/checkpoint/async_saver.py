"""`AsyncSaver`: saves checkpoints in a background thread; the training loop waits only for the copy to the host."""

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
from xla_adapters.checkpoint.store import CheckpointStore, refuse_inside_step
from xla_adapters.checkpoint.training_state import snapshot

_State = TypeVar("_State")
SAVE_FAILED_EXIT_CODE = 74
"""Exit status of a process whose last save failed after the training had ended (EX_IOERR of sysexits.h)."""


class AsyncSaver:
    """Saves to a store in the background, one checkpoint at a time.

    An error in the background is raised by the next `save`, by `wait`, or at the end of the `with` block. If none of
    these is called, the error is printed at the end of the process, which exits with `SAVE_FAILED_EXIT_CODE`.

    Args:
        store: where to save. With several processes, its group must be used by nothing else.

    Attributes:
        store: where the next save goes. Call `wait` before setting it.
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
        """Copies the state, then writes it in the background. Waits first if the previous save is still being written.

        Args:
            step, name, one_file, settings: as for `CheckpointStore.save`.
            state: what to save.
            write: writes the copy of the state to a folder (or to a file); runs in the thread.
            take: makes the copy.

        Raises:
            CheckpointWriteError: the previous save failed; this one was not started.
            CheckpointSaveError: it is called inside a step.
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
        """Waits for the save in progress; returns the last checkpoint that was written (None if there is none).

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
        # The body's error is raised; an error of the save is printed.
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


# Must run before the interpreter joins threads: after that no thread can be started and no pool used, which writers do.
# Callbacks run in reverse order, so this one runs before that of concurrent.futures, which the store has imported.
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
