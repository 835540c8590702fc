"""Runs each measurement in a forked child: XLA's state is per process and cannot be reset.

The parent imports everything and never computes with torch, so a child costs a fraction of a second
where a new interpreter costs many.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
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


def run_in_child(function: Callable[[], Any], *, timeout: float, env: Mapping[str, str] | None = None) -> Outcome:
    """Runs a function in a forked child, killed after `timeout` seconds; never raises for its sake."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        output, result = os.path.join(folder, "output"), os.path.join(folder, "result")
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _be_child(function, output, result, env or {})
        try:
            status = _wait(pid, started + timeout)
        except BaseException:
            _kill(pid)
            raise
        value, error = None, None
        if status is None:
            error = f"still running after {timeout:.0f} s, killed"
        elif not os.path.exists(result):
            died = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
            error = f"the process died with {died}"
        else:
            with open(result, "rb") as stream:
                value, error = pickle.load(stream)
        printed = ""
        if os.path.exists(output):
            with open(output, errors="replace") as text:
                printed = text.read()[-_OUTPUT_KEPT:]
    return Outcome(value, error, printed, time.monotonic() - started)


def _wait(pid: int, deadline: float) -> int | None:
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.01)
    _kill(pid)
    return None


def _kill(pid: int) -> None:
    # The group does not exist yet if the child was not scheduled since the fork.
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _be_child(function: Callable[[], Any], output: str, result: str, env: Mapping[str, str]) -> None:
    os.setpgid(0, 0)
    os.environ.update(env)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    value, error = None, None
    try:
        value = function()
    except BaseException:  # noqa: BLE001 (reported to the parent, whatever it is)
        error = traceback.format_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    with open(result + ".part", "wb") as stream:
        pickle.dump((value, error), stream)
    os.rename(result + ".part", result)
    # Not sys.exit: what the parent registered to run at its exit is the parent's.
    os._exit(0)
