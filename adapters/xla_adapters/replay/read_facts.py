"""What code reads from outside, held against its present state."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from xla_adapters.location import is_of_user
from xla_adapters.replay.values import ABSENT, copied, differs


class Fact(Protocol):
    """Something that is noted as it was."""

    def changed(self) -> str | None:
        """How it is another now, or None."""


@dataclass(frozen=True, slots=True)
class ReadFact:
    """Something that a step's code reads from outside.

    Attributes:
        owner: a module, class, object, dictionary or cell.
        name: of what is read there.
        value: what was found.
        said: how the code says it.
    """

    owner: Any
    name: str
    value: Any
    said: str

    @classmethod
    def of(cls, owner: Any, name: str, value: Any, said: str) -> ReadFact:
        """Notes a value, a container by what it holds."""
        return cls(owner, name, copied(value), said)

    @classmethod
    def of_contents(cls, owner: Any, contents: list[Any], said: str) -> ReadFact:
        """Notes what a container holds."""
        return cls(owner, "", list(map(copied, contents)), said)

    @classmethod
    def of_absence(cls, owner: Any, name: str) -> ReadFact:
        """Notes that there is nothing of that name, where it would be found first."""
        return cls(owner, name, ABSENT, f"{type(owner).__name__}.{name}")

    def changed(self) -> str | None:
        """How the code would read it differently now, or None."""
        if not self.name:
            present = inside(self.owner)
            same = len(present) == len(self.value) and not any(map(differs, present, self.value))
            return None if same else f"{self.said} holds something else"
        return f"{self.said} changed" if differs(_found(self.owner, self.name), self.value) else None


def holds_contents(fact: Fact) -> bool:
    """Whether a fact is what a container holds."""
    return isinstance(fact, ReadFact) and not fact.name


@dataclass(frozen=True, slots=True)
class FormFact:
    """A tensor that a step's code reads from outside, which the graph may know by its shape alone.

    Another tensor of the same form is no change: whose values the graph takes is known otherwise.

    Attributes:
        owner, name, said: as of a `ReadFact`.
        form: of the tensor.
    """

    owner: Any
    name: str
    said: str
    form: dict[str, Any]

    @classmethod
    def of(cls, owner: Any, name: str, value: torch.Tensor, said: str) -> FormFact:
        """Notes the form of a tensor."""
        return cls(owner, name, said, _form(value))

    def changed(self) -> str | None:
        """How the code would find something else now, or None."""
        found = _found(self.owner, self.name)
        if not isinstance(found, torch.Tensor):
            return f"{self.said} changed"
        form = _form(found)
        return next((f"{what} of {self.said} changed" for what in form if form[what] != self.form[what]), None)


def _form(tensor: torch.Tensor) -> dict[str, Any]:
    return {name: getattr(tensor, name) for name in ("shape", "dtype", "device", "requires_grad")}


def _found(owner: Any, name: str) -> Any:
    """What is under a name: in a cell, a dictionary, or an object or class itself."""
    if isinstance(owner, types.CellType):
        return content_of(owner)
    own = getattr(owner, "__dict__", None)
    if own is not None and name in own:
        return own[name]
    return owner.get(name, ABSENT) if isinstance(owner, dict) else ABSENT


@dataclass(frozen=True, slots=True)
class DefinitionFact:
    """What a function does, and what its arguments are if they are not given."""

    function: types.FunctionType
    code: types.CodeType
    values: tuple[Any, ...]

    @classmethod
    def of(cls, function: types.FunctionType) -> DefinitionFact:
        """Notes them as they are."""
        return cls(function, function.__code__, tuple(map(copied, _defaults(function))))

    def changed(self) -> str | None:
        """How they are others now, or None."""
        if self.function.__code__ is not self.code:
            return f"{self.function.__qualname__} got other code"
        present = _defaults(self.function)
        same = len(present) == len(self.values) and not any(map(differs, present, self.values))
        return None if same else f"the default arguments of {self.function.__qualname__} changed"


@dataclass(frozen=True, slots=True)
class PresenceFact:
    """Whether an object has an attribute."""

    owner: Any
    name: str
    present: bool

    @classmethod
    def of(cls, owner: Any, name: str) -> PresenceFact:
        """Notes whether it has it."""
        return cls(owner, name, has_attribute(owner, name))

    def changed(self) -> str | None:
        """Whether it came or went since."""
        if has_attribute(self.owner, self.name) is self.present:
            return None
        return f"{type(self.owner).__name__}.{self.name} {'went' if self.present else 'came'}"


def has_attribute(owner: Any, name: str) -> bool:
    """Whether an object has an attribute; none of its code is run."""
    own = getattr(owner, "__dict__", {})
    groups = ("_parameters", "_buffers", "_modules") if isinstance(owner, torch.nn.Module) else ()
    classes = (*(owner.__mro__ if isinstance(owner, type) else ()), *type(owner).__mro__)
    return name in own or any(name in own[group] for group in groups) or any(name in vars(cls) for cls in classes)


def inside(container: Any) -> list[Any]:
    """What a container holds, and under which keys."""
    if hasattr(container, "keys"):
        return [*container.keys(), *container.values()]
    return list(container)


def _defaults(function: types.FunctionType) -> tuple[Any, ...]:
    return (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


class FunctionFacts:
    """What a function reads from outside: its closure, the globals it names, and attributes of both that it names."""

    def __init__(self, function: Callable[..., Any]) -> None:
        owner = getattr(function, "__self__", None)
        function = getattr(function, "__func__", function)
        self._function = function
        code: types.CodeType | None = getattr(function, "__code__", None)
        self._globals = getattr(function, "__globals__", {})
        names = sorted(names_in(code)) if code is not None else ()
        self._named = {name: copied(self._globals[name]) for name in names if name in self._globals}
        self._cells = [(cell, copied(content_of(cell))) for cell in getattr(function, "__closure__", None) or ()]
        objects = [owner, *self._named.values(), *(value for _, value in self._cells)]
        self._attributes = [
            (item.__dict__, name, copied(item.__dict__[name]))
            for item in objects
            if hasattr(item, "__dict__") and not isinstance(item, torch.nn.Module) and not is_of_library(item)
            for name in names
            if name in item.__dict__
        ]

    def changed(self) -> str | None:
        """What the function would read differently now, or None."""
        for name, value in self._named.items():
            if differs(self._globals.get(name, ABSENT), value):
                return f"the global {name!r} changed"
        names = self._function.__code__.co_freevars if self._cells else ()
        for name, (cell, value) in zip(names, self._cells, strict=True):
            if differs(content_of(cell), value):
                return f"the variable {name!r} changed"
        for owner, name, value in self._attributes:
            if differs(owner.get(name, ABSENT), value):
                return f"the attribute {name!r} changed"
        return None


def names_in(code: types.CodeType) -> set[str]:
    """The globals and attributes that code names, in functions that it defines too."""
    inner = (names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


def is_of_library(item: Any) -> bool:
    """Whether it is a module or class of one."""
    if isinstance(item, type):
        item = sys.modules.get(item.__module__)
    elif not isinstance(item, types.ModuleType):
        return False
    # A session that is typed in has no file.
    return getattr(item, "__name__", "") != "__main__" and not is_of_user(
        getattr(item, "__file__", None) or "<built in>"
    )


def content_of(cell: types.CellType) -> Any:
    """What a variable of an enclosing function holds, or something that is nothing else if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT
