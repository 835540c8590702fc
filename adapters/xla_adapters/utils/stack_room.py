"""`with_stack_room`: a function that has room on Python's stack, also where a recursion has used it up."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
# Calls below the deepest of the decorated functions; they use some kilobytes of the C stack.
_ROOM = 400


def with_stack_room(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator: the function runs completely after a `RecursionError`, or does not begin.

    What cleans up after an exception runs close to the place where it was raised. After a `RecursionError` that is
    close to the recursion limit, and a second one in the middle of cleaning up would leave half of it undone.
    """

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(limit + _ROOM)
        try:
            return function(*args, **kwargs)
        finally:
            sys.setrecursionlimit(limit)

    return run
