"""`ReadGuards`: compare what the step's code reads from outside with its present state, before each replay."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from operator import is_
from typing import Any

import torch

from xla_adapters.replay.safety.trusted import is_users_class, lookup
from xla_adapters.utils.nested_values import ABSENT, copied, differs


class ReadGuards:
    """Records what the code has read, and tells whether it would read something else now. Runs no user code."""

    def __init__(self) -> None:
        self._found: set[tuple[Any, ...]] = set()
        self._checks: list[Callable[[], str | None]] = []
        self._contents: list[Callable[[], str | None]] = []
        # Checked last: the others say more precisely what changed.
        self._classes: list[Callable[[], str | None]] = []
        # Referenced, so that no other object gets the `id` of one that is compared by identity.
        self._kept: list[Any] = []

    def changed(self) -> str | None:
        """What has changed that the code reads, in words, or None."""
        return next(
            (change for check in (*self._checks, *self._contents, *self._classes) if (change := check()) is not None),
            None,
        )

    def release(self) -> None:
        """Drops the references to the contents of containers: a step that is traced may fill one at each call."""
        self._contents.clear()
        self._kept.clear()

    def _is_new(self, *key: Any) -> bool:
        if key in self._found:
            return False
        self._found.add(key)
        return True

    def entry(self, owner: dict[str, Any], name: str, said: str) -> None:
        """Guards an entry of a dictionary (the globals of a module, the attributes of an object), even if absent."""
        if self._is_new(id(owner), name):
            noted, get = copied(owner.get(name, ABSENT)), owner.get
            self._checks.append(lambda: f"{said} changed" if differs(get(name, ABSENT), noted) else None)

    def code_of(self, cls: type) -> None:
        """Guards the methods of the user's classes that a class derives from, and that no name is added to them."""
        for base in filter(is_users_class, cls.__mro__):
            if self._is_new(base, "code"):
                names = vars(base)
                noted = {name: member for name, member in names.items() if hasattr(type(member), "__get__")}
                self._classes.append(functools.partial(_other_code, base, len(names), noted))

    def kind(self, owner: Any, said: str) -> None:
        """Guards the class of an object, the methods of that class, and the identity of its `__dict__`."""
        self.code_of(type(owner))
        if self._is_new(id(owner), "kind"):
            cls, own = type(owner), getattr(owner, "__dict__", None)
            self._kept.append(owner)

            def check() -> str | None:
                is_same = type(owner) is cls and getattr(owner, "__dict__", None) is own
                return None if is_same else f"{said}: the object became one of another kind"

            self._checks.append(check)

    def cell(self, cell: types.CellType, said: str) -> None:
        """Guards a variable of an enclosing function."""
        if self._is_new(id(cell)):
            noted = copied(content_of(cell))
            self._kept.append(cell)
            self._checks.append(lambda: f"{said} changed" if differs(content_of(cell), noted) else None)

    def member(self, cls: type, name: str, said: str) -> None:
        """Guards a member of a class or its bases."""
        if self._is_new(cls, name):
            noted = copied(lookup(cls, name))
            self._checks.append(lambda: f"{said} was replaced" if differs(lookup(cls, name), noted) else None)

    def contents(self, container: Any, said: str) -> None:
        """Guards the items of a container, with their keys and order."""
        if self._is_new(id(container), "[]"):
            noted = list(map(copied, inside(container)))
            self._kept.append(container)

            def check() -> str | None:
                present = inside(container)
                equal = len(present) == len(noted) and not any(map(differs, present, noted))
                return None if equal else f"{said} holds something else"

            self._contents.append(check)

    def definition(self, function: types.FunctionType) -> None:
        """Guards the code of a function and the defaults of its arguments."""
        if self._is_new(id(function), "code"):
            code, noted = function.__code__, copied(_defaults(function))
            self._kept.append(function)

            def check() -> str | None:
                if function.__code__ is not code:
                    return f"{function.__qualname__} got other code"
                changed = any(map(differs, _defaults(function), noted)) or len(_defaults(function)) != len(noted)
                return f"the default arguments of {function.__qualname__} changed" if changed else None

            self._checks.append(check)

    def returned(self, function: Callable[[Any], Any], owner: Any, said: str) -> None:
        """Guards the objects that a property of the framework returns."""
        noted = tuple(function(owner))

        def check() -> str | None:
            present = tuple(function(owner))
            return f"{said} changed" if len(present) != len(noted) or any(map(differs, present, noted)) else None

        self._checks.append(check)

    def tensor(self, tensor: torch.Tensor, said: str) -> None:
        """Guards what the code can know of a tensor without reading its values: shape, dtype, mode, attributes."""
        if self._is_new(id(tensor), "tensor"):
            noted = _traits(tensor)
            self._kept.append(tensor)

            def check() -> str | None:
                return None if _traits(tensor) == noted else f"the shape, dtype or mode of {said} changed"

            self._checks.append(check)


def _other_code(cls: type, size: int, noted: Mapping[str, Any]) -> str | None:
    names = vars(cls)
    if len(names) == size and all(map(is_, map(names.get, noted), noted.values())):
        return None
    return f"a method of {cls.__qualname__} was replaced, or its class got or lost a name"


def _traits(tensor: torch.Tensor) -> tuple[Any, ...]:
    # The names of all attributes: code may ask for one that does not exist.
    own = list(vars(tensor))
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, own


def _defaults(function: types.FunctionType) -> tuple[Any, ...]:
    return (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


def inside(container: Any) -> list[Any]:
    """The items of one of Python's own containers, with the keys of a dictionary."""
    return [*container.keys(), *container.values()] if hasattr(container, "keys") else list(container)


def content_of(cell: types.CellType) -> Any:
    """The value of a variable of an enclosing function; `ABSENT` if it is not set yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def named_guards(function: Any) -> ReadGuards:
    """Guards on the globals and closure variables that a function names.

    For steps of which the user promises that they are safe (`step_replay=True`).
    """
    guards = ReadGuards()
    function = getattr(function, "__func__", function)
    if isinstance(function, types.FunctionType):
        guards.definition(function)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            guards.cell(cell, f"the variable {name}")
        for name in function.__code__.co_names:
            if name in function.__globals__:
                guards.entry(function.__globals__, name, f"the global {name}")
    return guards


__all__ = ["ReadGuards", "content_of", "inside", "named_guards"]
