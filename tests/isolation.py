"""Runs a test in a forked child: XLA's state is per process and cannot be reset.

`pytestmark = pytest.mark.isolated` does it for all tests of a file, `@isolated` for one; both take `env` and `timeout`.

The parent has imported everything and never touches the XLA runtime, nor computes with torch, so a
fork costs a fraction of a second where an import costs many.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from tests import children

_Test = TypeVar("_Test", bound=Callable[..., Any])
# Seconds for a child that waits in vain; one that still computes has so many times as long, on a slow or busy machine.
_TIMEOUT, _DEADLINE_FACTOR = 240.0, 6.0


class ChildFailed(AssertionError):
    """A test failed in its child process."""


def isolated(function: _Test | None = None, *, timeout: float = _TIMEOUT, env: dict[str, str] | None = None) -> Any:
    """Decorates a test to run in a forked child.

    Args:
        function: the test, if used without arguments.
        timeout: seconds after which the child is killed unless it still computes; a hang is a failure.
        env: environment variables for the child.
    """

    def decorate(test: _Test) -> _Test:
        @functools.wraps(test)
        def wrapper(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            run_in_child(functools.partial(test, *args, **kwargs), timeout=timeout, env=env)

        vars(wrapper)["runs_in_a_child"] = True
        return wrapper  # type: ignore[return-value]

    return decorate if function is None else decorate(function)


def run_in_child(function: Callable[[], Any], *, timeout: float = _TIMEOUT, env: dict[str, str] | None = None) -> Any:
    """Runs a function in a forked child and returns what it returned (pickled).

    Raises:
        ChildFailed: it raised, died or hung; with its traceback and output.
    """
    __tracebackhide__ = True
    outcome = outcome_of(function, timeout=timeout, env=env)
    if not outcome.ok:
        raise ChildFailed(f"{outcome.error}\n--- output of the child ---\n{outcome.output}")
    return outcome.value


def outcome_of(
    function: Callable[[], Any], *, timeout: float = _TIMEOUT, env: dict[str, str] | None = None
) -> children.Outcome:
    """As `run_in_child`, for children that are expected to raise or to die: returns how it ended."""
    with _not_the_tests_time():
        return children.run_in_child(function, timeout=timeout, deadline_factor=_DEADLINE_FACTOR, env=env)


@contextlib.contextmanager
def _not_the_tests_time() -> Iterator[None]:
    """Stops the clock of pytest-timeout: children have limits of their own, and a test may run many."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
