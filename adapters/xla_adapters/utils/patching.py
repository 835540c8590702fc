"""Changes for the time of a block: of an attribute, of the recursion limit, of what reaches standard output.

And whether the libraries whose attributes are replaced are of versions for which that was tested.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from importlib.metadata import PackageNotFoundError, requires, version
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from xla_adapters.errors import LibraryVersionWarning


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets `owner.name` to `value` inside the context; at the exit `owner` has its own value from before, or none.

    Where a module or a class has nothing to replace, a `LibraryVersionWarning` says so, once for each name.
    """
    if isinstance(owner, (type, ModuleType)) and not hasattr(owner, name):
        _warn_of_missing(owner.__module__ if isinstance(owner, type) else owner.__name__, name)
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


@cache
def _warn_of_missing(module: str, name: str) -> None:
    library = module.partition(".")[0]
    warnings.warn(
        f"{library} {_version(library) or ''} has no {name} in {module}, which xla-adapters replaces: what it does "
        "there is off",
        LibraryVersionWarning,
        stacklevel=2,
    )


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def warn_of_untested(extra: str, libraries: Iterable[str]) -> None:
    """Gives a `LibraryVersionWarning` for each library of a version that was not tested.

    Args:
        extra: of this package, which names the versions that were.
        libraries: by the names of their imports.
    """
    # What asks for it are libraries that need `packaging` themselves.
    from packaging.requirements import Requirement

    names = {name.replace("_", "-"): name for name in libraries}
    for stated in map(Requirement, requires("xla-adapters") or ()):
        installed = _version(stated.name) if stated.name in names else None
        if installed is None or stated.marker is None or not stated.marker.evaluate({"extra": extra}):
            continue
        if not stated.specifier.contains(installed, prereleases=True):
            warnings.warn(
                f"{stated.name} {installed} is installed; xla-adapters was tested with {stated.specifier}. What it "
                f"replaces there may have changed. To install a version that was tested: pip install "
                f"'xla-adapters[{extra}]'",
                LibraryVersionWarning,
                stacklevel=2,
            )


@contextmanager
def replaced_item(owner: MutableMapping[str, Any], name: str, value: Any) -> Iterator[None]:
    """Sets `owner[name]` to `value` inside the context; at the exit it has its value from before, or none."""
    before = {name: owner[name]} if name in owner else {}
    try:
        owner[name] = value
        yield
    finally:
        if before:
            owner.update(before)
        else:
            owner.pop(name, None)


@contextmanager
def wrapped(*functions: tuple[Any, str, Callable[[Any], Any]]) -> Iterator[None]:
    """Replaces attributes by what is made of them: owner, name, and what makes another function of the present one."""
    with ExitStack() as stack:
        for owner, name, wrap in functions:
            stack.enter_context(replaced(owner, name, wrap(getattr(owner, name))))
        yield


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


_STDOUT = 1


@contextmanager
def without_lines(prefix: str) -> Iterator[None]:
    """Inside the context, lines that begin with a prefix are not written to the process's standard output.

    Everything else that is written meanwhile, by other threads too, appears at the exit.

    Args:
        prefix: the beginning of the lines.
    """
    sys.stdout.flush()
    terminal = os.dup(_STDOUT)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), _STDOUT)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(terminal, _STDOUT)
            os.close(terminal)
            file.seek(0)
            for line in file:
                if not line.startswith(prefix.encode()):
                    os.write(_STDOUT, line)
