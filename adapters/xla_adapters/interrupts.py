"""Ctrl-C waits while a step is at one of its edges, where half a change would be left behind."""

from __future__ import annotations

import signal
import threading
from types import CodeType, FrameType
from typing import Any

_EDGES: set[CodeType] = set()


def at_edge(function: Any) -> Any:
    """Marks a function that must not be interrupted: it opens or closes a step."""
    _EDGES.add(function.__code__)
    return function


class InterruptGuard:
    """Holds SIGINT back while the main thread runs a function marked by `at_edge`.

    It looks at the interrupted frames instead of setting a flag: a signal may arrive between the
    call of an edge and its first instruction, where no flag could have been set yet. In the body of
    the step, the previous handler runs at once.
    """

    def __init__(self) -> None:
        self._previous: Any = None
        self._held_back: tuple[int, FrameType | None] | None = None
        self._installed = False

    def install(self) -> None:
        """Stands before the present handler; does nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._previous = signal.getsignal(signal.SIGINT)
        if callable(self._previous):
            self._installed = True
            signal.signal(signal.SIGINT, self._handle)

    def remove(self) -> None:
        """Puts the previous handler back."""
        if self._installed and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGINT) == self._handle:
                signal.signal(signal.SIGINT, self._previous)
            self._installed = False

    def finish(self) -> None:
        """Puts the previous handler back and hands on what was held back from it.

        Raises:
            KeyboardInterrupt: Ctrl-C was held back, and the previous handler raises this.
        """
        self.remove()
        held_back, self._held_back = self._held_back, None
        if held_back is not None:
            self._previous(*held_back)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A handler that was set meanwhile may hand on to this one when its step is over.
        current = frame if self._installed else None
        while current is not None:
            if current.f_code in _EDGES:
                self._held_back = (number, frame)
                return
            current = current.f_back
        self._previous(number, frame)
