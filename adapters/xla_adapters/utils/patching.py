"""Replaces an attribute temporarily."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets `owner.name` to `value` inside the context; at the exit `owner` has its former value, or none of its own."""
    is_own = name in vars(owner)
    original = vars(owner).get(name)
    # Inside: Ctrl-C may come as soon as it is set.
    try:
        setattr(owner, name, value)
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        elif name in vars(owner):
            delattr(owner, name)


@contextmanager
def wrapped(*functions: tuple[Any, str, Callable[[Any], Any]]) -> Iterator[None]:
    """Replaces attributes by what is made of them: owner, name, and what makes another function of the former one."""
    with ExitStack() as stack:
        for owner, name, wrap in functions:
            stack.enter_context(replaced(owner, name, wrap(getattr(owner, name))))
        yield
