"""Runs each measurement in a forked child: XLA's state is per process and cannot be reset.

The parent imports everything and never computes with torch, so a forked child starts in a fraction of a second; a new
interpreter would need many seconds for the imports.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_OUTPUT_KEPT = 6_000


@dataclass(frozen=True)
class Outcome:
    """How a child ended.

    Attributes:
        value: what the function returned (`None` if it did not).
        error: why it did not return, `None` if it did.
        output: the end of what it printed.
        seconds: how long it ran.
    """

    value: Any
    error: str | None
    output: str
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether the function returned."""
        return self.error is None

    @property
    def short_error(self) -> str | None:
        """The line of the error that names it."""
        return self.error.strip().splitlines()[-1] if self.error else None


class Child:
    """A function that runs in a forked child.

    Args:
        function: its value is pickled.
        env: environment variables for the child.
    """

    def __init__(self, function: Callable[[], Any], env: Mapping[str, str] | None = None) -> None:
        self._started = time.monotonic()
        self._folder = tempfile.TemporaryDirectory()
        self._output, self._result = (os.path.join(self._folder.name, name) for name in ("output", "result"))
        self._status: int | None = None
        self._killed = ""
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            _be_child(function, self._output, self._result, env or {})

    def ended(self) -> bool:
        """Whether the child has ended."""
        if self._status is None:
            done, status = os.waitpid(self._pid, os.WNOHANG)
            if done:
                self._status = status
        return self._status is not None

    def kill(self, why: str) -> None:
        """Kills the child if it is still running; `why` is then the error of its outcome."""
        if self.ended():
            return
        # The group does not exist yet if the child was not scheduled since the fork.
        try:
            os.killpg(self._pid, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(self._pid, signal.SIGKILL)
        _, self._status = os.waitpid(self._pid, 0)
        self._killed = why

    def outcome(self) -> Outcome:
        """The outcome of an ended child; to be called once, since it deletes the child's files."""
        assert self._status is not None
        value, error = None, None
        if self._killed:
            error = self._killed
        elif not os.path.exists(self._result):
            status = self._status
            died = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
            error = f"the process died with {died}"
        else:
            with open(self._result, "rb") as stream:
                value, error = pickle.load(stream)
        printed = ""
        if os.path.exists(self._output):
            with open(self._output, errors="replace") as text:
                printed = text.read()[-_OUTPUT_KEPT:]
        self._folder.cleanup()
        return Outcome(value, error, printed, time.monotonic() - self._started)


def run_in_child(function: Callable[[], Any], *, timeout: float, env: Mapping[str, str] | None = None) -> Outcome:
    """Runs a function in a forked child, which is killed after `timeout` seconds; its errors are in the outcome."""
    (outcome,) = run_in_children([function], timeout=timeout, env=env)
    return outcome


def run_in_children(
    functions: Sequence[Callable[[], Any]], *, timeout: float, env: Mapping[str, str] | None = None
) -> list[Outcome]:
    """As `run_in_child`, for several functions at the same time."""
    deadline = time.monotonic() + timeout
    children: list[Child] = []
    try:
        for function in functions:
            children.append(Child(function, env))
        while not all(child.ended() for child in children) and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        for child in children:
            child.kill(f"still running after {timeout:.0f} s, killed")
    return [child.outcome() for child in children]


def _be_child(function: Callable[[], Any], output: str, result: str, env: Mapping[str, str]) -> None:
    os.setpgid(0, 0)
    os.environ.update(env)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    value, error = None, None
    try:
        value = function()
    except SystemExit as left:
        # With the exit code, since subclasses (as Lightning's for SIGTERM) print only their name.
        error = f"{traceback.format_exc()}\nthe process left with exit code {left.code}"
    except BaseException:  # noqa: BLE001 (reported to the parent, whatever it is)
        error = traceback.format_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    with open(result + ".part", "wb") as stream:
        pickle.dump((value, error), stream)
    os.rename(result + ".part", result)
    # Not sys.exit, which would run the parent's exit handlers.
    os._exit(0)
