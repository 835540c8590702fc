"""Ctrl-C waits while a step is at one of its edges, where half a change would be left behind."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from types import CodeType, FrameType
from typing import Any

_CONTEXT_EDGES: frozenset[CodeType] = frozenset(
    getattr(contextlib._GeneratorContextManager, name).__code__ for name in ("__enter__", "__exit__")
)
_EDGES: set[CodeType] = set()


def at_edge(function: Any) -> Any:
    """Marks a function that must not be interrupted: it opens or closes a step."""
    _EDGES.add(function.__code__)
    return function


def finish_interrupted_exits() -> None:
    """Has contexts undo what they have to, where the error in flight has interrupted their own `__exit__`.

    What `contextlib.contextmanager` makes of a generator would otherwise do it when the error is let go of: torch would
    put a mode of a step that is long over back on its stack.
    """
    error = sys.exc_info()[1]
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback = error.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_code in _CONTEXT_EDGES:
                traceback.tb_frame.f_locals["self"].gen.close()
            traceback = traceback.tb_next
        error = error.__context__


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
            self._installed = False
            if signal.getsignal(signal.SIGINT) == self._handle:
                signal.signal(signal.SIGINT, self._previous)

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
        current = frame
        while current is not None:
            if current.f_code in _EDGES:
                self._held_back = (number, frame)
                return
            current = current.f_back
        self._previous(number, frame)
