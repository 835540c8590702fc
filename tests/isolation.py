"""Runs a test in a forked child: XLA's state is per process and cannot be reset.

The parent has imported everything and never touches the XLA runtime, nor computes with torch, so a
fork costs a fraction of a second where an import costs many.
"""

from __future__ import annotations

import functools
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

_Test = TypeVar("_Test", bound=Callable[..., Any])
_OUTPUT_SHOWN = 12_000


class ChildFailed(AssertionError):
    """A test failed in its child process."""


def isolated(function: _Test | None = None, *, timeout: float = 240, env: dict[str, str] | None = None) -> Any:
    """Decorates a test to run in a forked child.

    Args:
        function: the test, if used without arguments.
        timeout: seconds after which the child is killed; a hang is a failure.
        env: environment variables for the child.
    """

    def decorate(test: _Test) -> _Test:
        @functools.wraps(test)
        def wrapper(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            run_in_child(functools.partial(test, *args, **kwargs), timeout=timeout, env=env)

        return wrapper  # type: ignore[return-value]

    return decorate if function is None else decorate(function)


def run_in_child(function: Callable[[], Any], *, timeout: float = 240, env: dict[str, str] | None = None) -> Any:
    """Runs a function in a forked child and returns what it returned (pickled).

    Raises:
        ChildFailed: it raised, died or hung; with its traceback and output.
    """
    __tracebackhide__ = True
    with tempfile.TemporaryDirectory() as folder:
        output, result = os.path.join(folder, "output"), os.path.join(folder, "result")
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _child(function, output, result, env or {})
        status = _wait(pid, timeout)
        with open(output, errors="replace") as stream:
            printed = stream.read()[-_OUTPUT_SHOWN:]
        if status is None:
            raise ChildFailed(f"still running after {timeout} s, killed; its output:\n{printed}")
        if not os.path.exists(result):
            how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
            raise ChildFailed(f"the child died with {how} and left no result; its output:\n{printed}")
        with open(result, "rb") as stream_bytes:
            kind, value = pickle.load(stream_bytes)
    if kind == "skipped":
        pytest.skip(value)
    if kind == "failed":
        raise ChildFailed(f"{value}\n--- output of the child ---\n{printed}")
    return value


def _wait(pid: int, timeout: float) -> int | None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.01)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _child(function: Callable[[], Any], output: str, result: str, env: dict[str, str]) -> None:
    os.setpgid(0, 0)
    os.environ.update(env)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    try:
        outcome: tuple[str, Any] = ("returned", function())
    except pytest.skip.Exception as skipped:
        outcome = ("skipped", str(skipped))
    except BaseException:  # noqa: BLE001 (reported by the parent)
        outcome = ("failed", traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    with open(result + ".part", "wb") as stream:
        pickle.dump(outcome, stream)
    os.rename(result + ".part", result)
    # Not sys.exit: pytest's own cleanup belongs to the parent.
    os._exit(0)
