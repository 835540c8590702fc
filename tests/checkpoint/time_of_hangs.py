"""Deadlines of the watchdog that pass for a thread when it hangs: a slow machine is no hang, and no test waits."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import NoReturn

import pytest

from xla_adapters.checkpoint import group

_hanging: set[int] = set()


def hang() -> NoReturn:
    """Python code that does not return; the deadline over this thread has passed."""
    _hanging.add(threading.get_ident())
    while True:
        time.sleep(0.01)


class _Over(threading.Event):
    """Is set when a watched block is over. Waiting for it ends in vain when the thread of the block hangs."""

    def __init__(self) -> None:
        super().__init__()
        self._watched = threading.get_ident()

    def wait(self, timeout: float | None = None) -> bool:
        while not super().wait(0.005):
            if self._watched in _hanging:
                # It goes on with an error.
                _hanging.remove(self._watched)
                return False
        return True


def use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watchdogs do not look at the time."""
    monkeypatch.setattr(group, "threading", SimpleNamespace(**{**vars(threading), "Event": _Over}))
