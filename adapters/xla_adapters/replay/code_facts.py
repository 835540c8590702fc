"""`CodeFacts`: what the user's own code in a step and its modules reads from outside, helpers and methods too."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from xla_adapters.location import is_of_user
from xla_adapters.replay.read_facts import FunctionFacts, content_of, is_of_library, names_in
from xla_adapters.replay.values import differs


@dataclass(frozen=True, slots=True)
class _Member:
    """What a name means in a class and those it derives from."""

    owner: type
    name: str
    definitions: list[Any]

    @classmethod
    def of(cls, owner: type, name: str) -> _Member:
        return cls(owner, name, _definitions(owner, name))

    def changed(self) -> str | None:
        present = _definitions(self.owner, self.name)
        same = len(present) == len(self.definitions) and not any(map(differs, present, self.definitions))
        return None if same else f"{self.owner.__name__}.{self.name} was replaced"


class CodeFacts:
    """Globals, closures and members of classes that code reads, as they are now.

    Code of libraries is not looked into: of their modules it is noted which `forward` they have.

    Args:
        functions: of the step.
        modules: that take part in it.
        deep: whether to look into what they call, and into the code of modules; if not, effects of that which a replay
            leaves out (`step_replay=True`) do not count as changes.
    """

    def __init__(
        self,
        functions: Iterable[Callable[..., Any]] = (),
        modules: Iterable[torch.nn.Module] = (),
        *,
        deep: bool = True,
    ) -> None:
        self._deep = deep
        self._facts: list[FunctionFacts | _Member] = []
        self._seen: set[object] = set()
        for function in functions:
            # Wherever it comes from, it is the step; attributes of the object that it is bound to count, too.
            self._facts.append(FunctionFacts(function))
            inner, owner = _function_of(function), type(getattr(function, "__self__", None))
            if deep and inner is not None:
                self._seen.add((id(inner), owner))
                self._follow(inner, owner)
        for module in modules:
            self._note(type(module), "forward")
            if "forward" in vars(module):
                self._look_into(vars(module)["forward"], type(module))

    def changed(self) -> str | None:
        """What the code would read differently now, or None."""
        for fact in self._facts:
            change = fact.changed()
            if change is not None:
                return change
        return None

    def _note(self, owner: type, name: str) -> None:
        if (owner, name) in self._seen:
            return
        self._seen.add((owner, name))
        member = _Member.of(owner, name)
        if member.definitions:
            self._facts.append(member)
            for definition in member.definitions:
                self._look_into(definition, owner)

    def _look_into(self, item: Any, owner: type) -> None:
        function = _function_of(item)
        if not self._deep or function is None or (id(function), owner) in self._seen:
            return
        self._seen.add((id(function), owner))
        if is_of_user(function.__code__.co_filename):
            self._facts.append(FunctionFacts(function))
        self._follow(function, owner)

    def _follow(self, function: types.FunctionType, owner: type) -> None:
        """Looks into what a function calls."""
        self._look_into(getattr(function, "__wrapped__", None), owner)
        if not is_of_user(function.__code__.co_filename):
            return
        names = names_in(function.__code__)
        for name in names:
            self._note(owner, name)
            found = function.__globals__.get(name)
            self._look_into(found, type(None))
            if isinstance(found, types.ModuleType) and not is_of_library(found):
                for attribute in names & vars(found).keys():
                    self._look_into(vars(found)[attribute], type(None))
        for cell in function.__closure__ or ():
            self._look_into(content_of(cell), type(None))


def _definitions(owner: type, name: str) -> list[Any]:
    return [vars(base)[name] for base in owner.__mro__ if name in vars(base)]


def _function_of(item: Any) -> types.FunctionType | None:
    if isinstance(item, property):
        item = item.fget
    item = getattr(item, "__func__", item)
    return item if isinstance(item, types.FunctionType) else None
