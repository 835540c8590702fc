"""`Value`: what an expression of the step's code may stand for. `Frame` and `At`: where in the code it is."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from xla_adapters.utils.location import place_text


class Unsafe(Exception):
    """The code does something that a replay would skip or get wrong; the message says what, with file and line."""


@dataclass(frozen=True, eq=False)
class Value:
    """The objects that an expression may evaluate to.

    Attributes:
        outside: objects from before the step that it may be. If there are none, it is data: tensors, constants, and
            containers of these that the step made.
        constant: a tuple of the value itself if it is a known constant; otherwise empty.
        exact: whether it certainly is one of `outside`; otherwise it may also be data.
    """

    outside: tuple[Any, ...] = ()
    constant: tuple[Any, ...] = ()
    exact: bool = True

    def vaguely(self, other: Value) -> Value:
        """This value, read from another one that may be data instead."""
        return self if other.exact else Value(self.outside, exact=False)

    def key(self) -> Hashable:
        """Equal for two values that stand for the same objects."""
        constant = tuple((type(item), repr(item)) for item in self.constant)
        return frozenset(map(_identity, self.outside)), constant, self.exact


DATA = Value()
# As the name of an argument: the caller may give further arguments that are not known.
UNKNOWN = "?"


def either(values: Iterable[Value]) -> Value:
    """A value that may be any of these; data if there are none."""
    values = list(values) or [DATA]
    found = {_identity(item): item for value in values for item in value.outside}
    if len({value.key() for value in values}) == 1:
        return values[0]
    return Value(tuple(found.values()), exact=all(value.outside and value.exact for value in values))


class Batch:
    """The step's batch: data that code after the step sees, so that the step must not change it."""


class MadeModule:
    """A module of torch that the step makes itself (a loss, for example)."""


@dataclass(frozen=True)
class Varying:
    """Something that differs from call to call without changing the step's signature."""

    name: str


@dataclass(frozen=True, eq=False)
class Held:
    """A container that the step makes and that contains objects from before the step."""

    value: Value


@dataclass(frozen=True, eq=False)
class Method:
    """A function bound to an object from before the step."""

    function: Any
    owner: Any


@dataclass(frozen=True, eq=False)
class DataMethod:
    """A method of data, or of a container from before the step."""

    owner: Value
    name: str


@dataclass(frozen=True, eq=False)
class Super:
    """`super()` in a method of the class `after`: attributes are looked up in the classes after that one."""

    owner: Any
    after: type


MARKERS = (Batch, MadeModule, Varying, Held, Method, DataMethod, Super)


def _identity(item: Any) -> Hashable:
    if isinstance(item, Held):
        return Held, item.value.key()
    if isinstance(item, (Method, Super)):
        return type(item), id(item.owner), id(item.function if isinstance(item, Method) else item.after)
    if isinstance(item, DataMethod):
        return DataMethod, item.owner.key(), item.name
    return (type(item),) if isinstance(item, (Batch, MadeModule)) else id(item)


@dataclass
class Frame:
    """A call of a function that is being followed.

    Attributes:
        function: what is followed.
        owner: the object that it is a method of.
        file, line: where its source begins.
        names: what its local names may stand for.
        results: what it may return.
        branches: how many branches or loops the present statement is inside of.
    """

    function: Any
    owner: Any
    file: str
    line: int
    names: dict[str, Value] = field(default_factory=dict)
    results: list[Value] = field(default_factory=list)
    branches: int = 0


@dataclass(frozen=True)
class At:
    """A node of the syntax tree of a function that is being followed."""

    node: ast.AST
    frame: Frame

    @property
    def said(self) -> str:
        """The source of the node, for messages."""
        return ast.unparse(self.node)[:60]

    def unsafe(self, what: str) -> Unsafe:
        """The error for something that is not known to be safe."""
        line = self.frame.line + getattr(self.node, "lineno", 1) - 1
        return Unsafe(f"{what} ({place_text(f'{self.frame.file}:{line}')})")


Returned = Callable[[Any], Iterable[Any]]


def nothing(owner: Any) -> Iterable[Any]:
    """For a call that returns no object from before the step."""
    return ()


@dataclass(frozen=True, kw_only=True)
class FrameworkModel:
    """Describes the framework around the step's code.

    Attributes:
        calls: functions whose effects the adapter reproduces in a replay. The value is a function from their owner to
            the objects from before the step that they return.
        properties: names of properties of the framework's objects. The value is a function from the object to what
            the property returns.
        methods: names of methods of trusted modules that only compute.
    """

    calls: Mapping[Any, Returned] = field(default_factory=dict)
    properties: Mapping[str, Returned] = field(default_factory=dict)
    methods: frozenset[str] = frozenset()


# Methods of all modules that have no effect, or one that the guards on modules see, such as another mode.
_HARMLESS = "parameters named_parameters buffers named_buffers zero_grad train eval requires_grad_"
MODULE_CALLS: Mapping[Any, Returned] = {
    **{getattr(torch.nn.Module, name): nothing for name in _HARMLESS.split()},
    **{getattr(torch.nn.Module, name): torch.nn.Module.modules for name in ("modules", "named_modules")},
    **{getattr(torch.nn.Module, name): torch.nn.Module.children for name in ("children", "named_children")},
}


@functools.cache
def empty_frame(name: str) -> Frame:
    """A frame for code of a library, which is not followed."""
    return Frame(None, None, name, 1)
