"""`replay_safe`: marks a function as safe that the analysis cannot follow."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

_promised: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def replay_safe(function: _Function) -> _Function:
    """Promises that a function only computes its result from its arguments. Use it as a decorator.

        @xla_adapters.replay_safe
        def focal(logits, labels, gamma=2.0): ...

    Steps that call it can be replayed, because its code is not followed. Anything else that it reads keeps the value
    from when the step was traced, and its side effects (a print, a counter) happen in traced calls only. The calls that
    are traced to verify replays detect a broken promise (see `on_replay_mismatch`).
    """
    _promised.add(getattr(function, "__func__", function))
    return function


def is_promised(function: Any) -> bool:
    """Whether a function is promised to be safe."""
    return getattr(function, "__func__", function) in _promised
