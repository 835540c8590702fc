"""What an expression of a step's code may stand for, and what is known of the framework around the code."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import sys
import types
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from xla_adapters.location import is_of_user
from xla_adapters.replay.read_facts import is_of_library

if TYPE_CHECKING:
    from xla_adapters.replay.lookups import Frame

_CHANGING = "append extend insert remove pop popitem clear update setdefault sort reverse add discard"
CHANGING_METHODS = frozenset(_CHANGING.split())


class Unproven(Exception):
    """The code does something that a replay would leave out, or may; the message says what and where."""


@dataclass(frozen=True, eq=False)
class Value:
    """What an expression may stand for.

    Attributes:
        outside: objects from before the step; whatever the step made itself is not listed.
        varying: what differs from step to step without a trace in its signature; empty if nothing.
    """

    outside: tuple[Any, ...] = ()
    varying: str = ""

    def __hash__(self) -> int:
        return hash((*map(id, self.outside), self.varying))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and hash(self) == hash(other)

    def stands_for(self) -> Hashable:
        """The same for two values that stand for the same things."""
        return frozenset(map(_identity, self.outside)), self.varying

    def join(self, other: Value) -> Value:
        """Either of both."""
        if other is self or other is FRESH:
            return self
        known = set(map(id, self.outside))
        more = tuple(item for item in other.outside if id(item) not in known)
        return Value(self.outside + more, self.varying or other.varying)


def _identity(item: Any) -> Hashable:
    if isinstance(item, Held):
        return "held", item.value.stands_for()
    if isinstance(item, Local):
        return "local", id(item.node)
    if isinstance(item, (Method, Super)):
        return type(item), id(item.function if isinstance(item, Method) else item.behind), id(item.owner)
    if isinstance(item, (ContainerMethod, KnownMethod)):
        holder = item.container if isinstance(item, ContainerMethod) else item.owner
        return type(item), _identity(holder), item.name
    return id(item)


FRESH = Value()


@dataclass(frozen=True, eq=False)
class Method:
    """A function bound to an object from before the step."""

    function: Callable[..., Any]
    owner: Any


@dataclass(frozen=True, eq=False)
class ContainerMethod:
    """A method of a builtin container, or of a batch."""

    container: Any
    name: str


@dataclass(frozen=True, eq=False)
class KnownMethod:
    """A method of a known module that does nothing but compute."""

    owner: Any
    name: str


@dataclass(frozen=True, eq=False)
class Held:
    """A container that the step makes, with objects from before it inside."""

    value: Value


@dataclass(frozen=True, eq=False)
class Local:
    """A function that the code defines itself."""

    node: ast.FunctionDef | ast.Lambda
    frame: Frame


@dataclass(frozen=True, eq=False)
class Super:
    """`super()` in a method."""

    owner: Any
    behind: type


class Batch:
    """Stands for a step's batch, which others see after it."""


@dataclass(kw_only=True)
class Knowledge:
    """What is known of a framework.

    Attributes:
        packages: prefixes of the names of modules whose `torch.nn.Module`s do nothing but compute; None for those of
            all libraries.
        calls: functions whose effects are taken care of, with what they return, given their owner.
        methods: names of methods of known modules that do nothing but compute.
        properties: of the framework's objects, by name, with what reading them gives.
    """

    packages: tuple[str, ...] | None
    calls: Mapping[Any, Callable[[Any], Iterable[Any]]] = field(default_factory=dict)
    methods: frozenset[str] = frozenset()
    properties: Mapping[str, Callable[[Any], Iterable[Any]]] = field(default_factory=dict)

    def covers(self, item: type | Callable[..., Any]) -> bool:
        """Whether a class or function is of a package that is known."""
        if isinstance(item, types.FunctionType) and is_of_user(item.__code__.co_filename):
            # One that wraps a library's goes by its module.
            return False
        if self.packages is None:
            return is_of_library(sys.modules.get(item.__module__ or ""))
        return (item.__module__ or "").startswith(self.packages)


def nothing(owner: Any) -> Iterable[Any]:
    """What a call returns that hands out nothing from before the step."""
    return ()


# Methods of all modules, with what they return: they do nothing, or what the facts of modules show.
OF_MODULES: Mapping[Any, Callable[[Any], Iterable[Any]]] = {
    **dict.fromkeys(
        (
            torch.nn.Module.parameters,
            torch.nn.Module.named_parameters,
            torch.nn.Module.buffers,
            torch.nn.Module.named_buffers,
            torch.nn.Module.zero_grad,
            # A pass that finds another mode than the one recorded found it is traced.
            torch.nn.Module.train,
            torch.nn.Module.eval,
        ),
        nothing,
    ),
    torch.nn.Module.modules: torch.nn.Module.modules,
    torch.nn.Module.named_modules: torch.nn.Module.modules,
    torch.nn.Module.children: torch.nn.Module.children,
    torch.nn.Module.named_children: torch.nn.Module.children,
}


# What dictionaries are made of, and what each class has.
_OF_DICT = (types.WrapperDescriptorType, types.MethodDescriptorType, types.GetSetDescriptorType)


def is_record(cls: Any) -> bool:
    """Whether something is the class of a namespace, named tuple, dataclass or dictionary without code of its own."""
    if not isinstance(cls, type) or cls is dict:
        return False
    if cls is types.SimpleNamespace:
        return True
    code = (types.FunctionType, property, classmethod, staticmethod)
    if any(isinstance(member, code) and not name.startswith("_") for name, member in vars(cls).items()):
        return False
    if any(
        isinstance(member, types.FunctionType) and is_of_user(member.__code__.co_filename)
        for member in vars(cls).values()
    ):
        return False
    if dataclasses.is_dataclass(cls) and any(
        isinstance(field.default_factory, types.FunctionType) for field in dataclasses.fields(cls)
    ):
        return False
    if issubclass(cls, dict):
        # One whose keys are attributes, say, or a `TypedDict`.
        own = [member for base in cls.__mro__[:-2] for member in vars(base).values()]
        is_code = [callable(member) or hasattr(member, "__get__") for member in own]
        return all(isinstance(member, _OF_DICT) for member in itertools.compress(own, is_code))
    named_tuple = issubclass(cls, tuple) and hasattr(cls, "_fields")
    return named_tuple or (dataclasses.is_dataclass(cls) and not hasattr(cls, "__post_init__"))


def name_of(item: Any) -> str:
    """What to call an object in a message."""
    if isinstance(item, Batch):
        return "the batch"
    name = getattr(item, "__qualname__", None) or type(item).__qualname__
    return str(name) if isinstance(item, (type, types.FunctionType)) else f"a {name} from before the step"
