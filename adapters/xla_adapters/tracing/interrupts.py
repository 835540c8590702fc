"""`InterruptGuard`: delays Ctrl-C while a step opens or closes, so that these are done completely."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

_EDGES: set[CodeType] = set()


def at_edge(function: _Function) -> _Function:
    """Marks a function that must not be interrupted by Ctrl-C: it opens or closes a step."""
    _EDGES.add(function.__code__)
    return function


class InterruptGuard:
    """Delays SIGINT while the main thread runs a function marked by `at_edge`.

    It inspects the interrupted frames instead of a flag, because a signal may arrive between the call of such a
    function and its first instruction, before a flag could be set. In the body of the step, the previous handler runs
    at once.
    """

    def __init__(self) -> None:
        self._previous: Any = None
        self._delayed: tuple[int, FrameType | None] | None = None
        self._raised: BaseException | None = None
        self._installed = False

    def install(self) -> None:
        """Replaces the present handler; does nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._previous = signal.getsignal(signal.SIGINT)
        if callable(self._previous):
            self._installed = True
            signal.signal(signal.SIGINT, self._handle)

    def remove(self) -> None:
        """Restores the previous handler."""
        if self._installed and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGINT) == self._handle:
                signal.signal(signal.SIGINT, self._previous)
            self._installed = False

    def finish(self) -> None:
        """Restores the previous handler and passes a delayed signal to it.

        Raises:
            KeyboardInterrupt: Ctrl-C was delayed, and the previous handler raises this.
        """
        self.remove()
        self._raised = None
        delayed, self._delayed = self._delayed, None
        if delayed is not None:
            self._previous(*delayed)

    def check(self) -> None:
        """Raises again what the previous handler has raised in the step's body, if the step went on.

        The exception of a signal handler is lost where C code (a destructor, a search for an attribute) meets it, and
        what was running there has not done its work.

        Raises:
            KeyboardInterrupt: or what else the handler has raised.
        """
        if self._raised is not None:
            raise self._raised

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A handler that was installed later may call this one after the step.
        current = frame if self._installed else None
        while current is not None:
            if current.f_code in _EDGES:
                self._delayed = (number, frame)
                return
            current = current.f_back
        try:
            self._previous(number, frame)
        except BaseException as error:
            self._raised = error if self._installed else None
            raise
