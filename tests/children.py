"""Runs each measurement in a forked child: XLA's state is per process and cannot be reset.

The parent imports everything and never computes with torch, so a forked child starts in a fraction of a second; a new
interpreter would need many seconds for the imports.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_OUTPUT_KEPT = 6_000
# A child that is over its time is looked at that often; one that computes for a smaller part of that time hangs.
_LOOKED_AT_SECONDS = 20.0
_HANGS_BELOW = 0.01


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

    def result(self) -> Any:
        """What the function returned.

        Raises:
            RuntimeError: it did not.
        """
        if self.error is not None:
            raise RuntimeError(f"{self.error}\n{self.output}")
        return self.value

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

    def cpu_seconds(self) -> float:
        """What the child and the processes that it has started have computed; 0 where the system has no /proc."""
        ticks: dict[int, int] = {}
        started: dict[int, list[int]] = {}
        for status in Path("/proc").glob("[0-9]*/stat"):
            # It may end before it is read.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                # Behind the name, which may have spaces. The times are its own, and those of its children that ended.
                fields = status.read_text().rpartition(")")[2].split()
                started.setdefault(int(fields[1]), []).append(pid := int(status.parent.name))
                ticks[pid] = sum(map(int, fields[11:15]))
        family = [self._pid]
        for pid in family:
            family.extend(started.get(pid, ()))
        return sum(ticks.get(pid, 0) for pid in family) / os.sysconf("SC_CLK_TCK")

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


def run_in_child(
    function: Callable[[], Any], *, timeout: float, deadline_factor: float = 1.0, env: Mapping[str, str] | None = None
) -> Outcome:
    """As `run_in_children`, for one function."""
    (outcome,) = run_in_children([function], timeout=timeout, deadline_factor=deadline_factor, env=env)
    return outcome


def run_in_children(
    functions: Sequence[Callable[[], Any]],
    *,
    timeout: float,
    deadline_factor: float = 1.0,
    env: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """Runs functions in forked children at the same time.

    Args:
        functions: their values are pickled.
        timeout: seconds after which children are killed.
        deadline_factor: children that still compute at the timeout have so many times as long: a slow machine, or one
            with other work to do, is told from a hang.
        env: environment variables for the children.

    Returns:
        Their outcomes, with the errors.
    """
    started = time.monotonic()
    children: list[Child] = []
    try:
        for function in functions:
            children.append(Child(function, env))
        computed, look_at = 0.0, timeout
        while not all(child.ended() for child in children):
            time.sleep(0.01)
            if time.monotonic() - started < look_at:
                continue
            before, computed = computed, sum(child.cpu_seconds() for child in children)
            # At the timeout itself it is only noted what they have computed so far.
            hangs = look_at > timeout and computed - before < _HANGS_BELOW * _LOOKED_AT_SECONDS
            if hangs or look_at >= deadline_factor * timeout:
                break
            look_at = min(look_at + _LOOKED_AT_SECONDS, deadline_factor * timeout)
    finally:
        for child in children:
            child.kill(f"still running after {time.monotonic() - started:.0f} s, killed")
    return [child.outcome() for child in children]


def _be_child(function: Callable[[], Any], output: str, result: str, env: Mapping[str, str]) -> None:
    os.setpgid(0, 0)
    os.environ.update(env)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    # Into the child's output. Of the thread that crashed alone: the stacks of others, which run on, cannot be read.
    faulthandler.enable(file=2, all_threads=False)
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
