"""What the names and attributes in a step's code stand for: found in the objects themselves, and noted."""

from __future__ import annotations

import ast
import builtins
import types
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.optim import Optimizer

from xla_adapters.location import is_of_user
from xla_adapters.replay.outside import (
    CHANGING_METHODS,
    FRESH,
    Batch,
    ContainerMethod,
    Held,
    Knowledge,
    KnownMethod,
    Local,
    Method,
    Super,
    Unproven,
    Value,
    name_of,
)
from xla_adapters.replay.pure_calls import READING_METHODS
from xla_adapters.replay.read_facts import (
    DefinitionFact,
    Fact,
    FormFact,
    PresenceFact,
    ReadFact,
    content_of,
    has_attribute,
    inside,
)
from xla_adapters.replay.values import ABSENT, is_simple

# What functions may be given that do not change it.
PLAIN = (Batch, Held, list, dict, set, tuple, type, Enum, torch.nn.Module)


_BUILT_IN = (list, tuple, set, frozenset, dict)
_OF_MODULES = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
# Held against their present contents before each replay.
_MOST_CONTENTS = 4096
# What code does with an object without calling a method by its name.
SPECIAL = ("__bool__", "__len__", "__iter__", "__getitem__", "__contains__", "__eq__", "__hash__", "__missing__")
_OF_TWO = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and or xor "
_OF_ONE = "lt le ne gt ge neg pos abs invert index int float complex round str repr format "
COMPUTED = (
    *SPECIAL,
    *(f"__{kind}{name}__" for name in _OF_TWO.split() for kind in ("", "r", "i")),
    *(f"__{name}__" for name in _OF_ONE.split()),
)
_TESTED = ("__bool__", "__len__")


@dataclass
class Frame:
    """One function under examination: its names, and where it stands."""

    function: Any
    owner: Any
    file: str
    line: int
    names: dict[str, Value]
    result: Value = FRESH
    branches: int = 0


class Lookups:
    """Finds what code reads, and notes it.

    Args:
        knowledge: of the framework around the code.

    Attributes:
        facts: what was read from outside, as it is now.
    """

    def __init__(self, knowledge: Knowledge) -> None:
        self.facts: list[Fact] = []
        self._used: dict[int, torch.nn.Module] = {}
        self._knowledge = knowledge
        self._noted: set[tuple[int, str]] = set()
        self._contents = _MOST_CONTENTS

    @property
    def modules(self) -> list[torch.nn.Module]:
        """Those that the code uses."""
        return list(self._used.values())

    def _function(self, function: Any, owner: Any, arguments: Sequence[Value], options: dict[str, Value]) -> Value:
        raise NotImplementedError

    def _fail(self, node: ast.AST, frame: Frame, what: str) -> Unproven:
        line = frame.line + getattr(node, "lineno", 1) - 1
        return Unproven(f"{what} ({frame.file}:{line})")

    def _name(self, node: ast.Name, frame: Frame) -> Value:
        if node.id in frame.names:
            return frame.names[node.id]
        function = frame.function
        free = function.__code__.co_freevars
        if node.id in free and function.__closure__ is not None:
            cell = function.__closure__[free.index(node.id)]
            content = content_of(cell)
            if content is ABSENT:
                raise self._fail(node, frame, f"it reads {node.id}, which is not there yet")
            return self._read(cell, "cell_contents", content, node.id, node, frame)
        if node.id in function.__globals__:
            return self._read(function.__globals__, node.id, function.__globals__[node.id], node.id, node, frame)
        if node.id in function.__code__.co_varnames or node.id in function.__code__.co_cellvars:
            # In a loop that binds it further on, which is gone through again.
            return FRESH
        builtin = getattr(builtins, node.id, None)
        if builtin is None:
            # A local that no assignment came before: of an enclosing block, or an error when it runs.
            raise self._fail(node, frame, f"the name {node.id} is not followed")
        return Value((builtin,))

    def _read(self, owner: Any, name: str, value: Any, said: str, node: ast.AST, frame: Frame) -> Value:
        if isinstance(value, torch.Tensor):
            if value.device.type != "xla":
                raise self._fail(node, frame, f"it reads {said}, a tensor that is not on the device")
            if (id(owner), name) not in self._noted:
                self._noted.add((id(owner), name))
                self.facts.append(FormFact.of(owner, name, value, said))
            return FRESH
        if (id(owner), name) not in self._noted:
            self._noted.add((id(owner), name))
            self.facts.append(ReadFact.of(owner, name, value, said))
            self._note_contents(value, node, frame)
        return FRESH if is_constant(value) else Value((value,))

    def _note_absence(self, owner: Any, name: str) -> None:
        if hasattr(owner, "__dict__") and (id(owner), name) not in self._noted:
            self._noted.add((id(owner), name))
            self.facts.append(ReadFact.of_absence(owner, name))

    def _note_presence(self, value: Value, name: str) -> bool:
        """Notes which objects have an attribute; returns whether any has."""
        owners = [item for item in value.outside if not isinstance(item, (Batch, Held))]
        self.facts.extend(PresenceFact.of(owner, name) for owner in owners)
        return any(has_attribute(owner, name) for owner in owners)

    def _note_definition(self, function: types.FunctionType) -> None:
        if (id(function), "") not in self._noted:
            self._noted.add((id(function), ""))
            self.facts.append(DefinitionFact.of(function))

    def _note_contents(self, value: Any, node: ast.AST, frame: Frame) -> None:
        """Notes what a container holds: code may count it, compare it, or ask whether it is empty."""
        if isinstance(value, _BUILT_IN) and not is_simple(value):
            for part in self._note_held(value, node, frame):
                self._note_contents(part, node, frame)

    def _note_held(self, value: Any, node: ast.AST, frame: Frame) -> list[Any]:
        """What a container holds, which is noted; nothing if it was noted before."""
        if (id(value), "[]") in self._noted:
            return []
        held = inside(value)
        self._contents -= len(held)
        if self._contents < 0:
            raise self._fail(node, frame, f"it reads {name_of(value)}: too much to be compared before each step")
        self._noted.add((id(value), "[]"))
        self.facts.append(ReadFact.of_contents(value, held, name_of(value)))
        return held

    def _use(self, module: torch.nn.Module) -> None:
        self._used.setdefault(id(module), module)

    def _element(self, value: Value, node: ast.AST, frame: Frame, key: Any = None) -> Value:
        """What a container holds.

        Args:
            value: the container.
            node, frame: where.
            key: of what is asked for, if it is known.
        """
        found = Value((), value.varying)
        for item in value.outside:
            if isinstance(item, Held):
                found = found.join(item.value)
            elif isinstance(item, (*_BUILT_IN, *_OF_MODULES)):
                found = found.join(self._special(item, SPECIAL))
                self._note_held(item, node, frame)
                held = tuple(part for part in _chosen(item, key) if not is_constant(part))
                if any(isinstance(part, torch.Tensor) and part.device.type != "xla" for part in held):
                    raise self._fail(node, frame, f"it reads tensors of {name_of(item)} that are not on the device")
                found = found.join(Value(tuple(part for part in held if not isinstance(part, torch.Tensor))))
            elif isinstance(item, (Batch, torch.nn.Module, Local)) or callable(item):
                found = found.join(self._special(item, SPECIAL)).join(Value((item,)))
            else:
                raise self._fail(node, frame, f"it looks into {name_of(item)}")
        return found

    def _special(self, item: Any, names: Sequence[str]) -> Value:
        """Follows the user's own special methods of an object, which code may call in passing."""
        found = FRESH
        for name in names if not isinstance(item, type) else ():
            method = getattr(type(item), name, None)
            if _is_of_user(method):
                found = found.join(self._function(method, item, [Value((item,))], {}))
        return found

    def _truth(self, value: Value, node: ast.AST, frame: Frame) -> None:
        """It is asked whether something is true, or empty."""
        for item in value.outside:
            self._special(item, _TESTED)
            own = [getattr(type(item), name) for name in _TESTED if hasattr(type(item), name)]
            if isinstance(item, PLAIN):
                self._note_contents(item, node, frame)
            elif not isinstance(item, type) and not all(map(_is_of_user, own)):
                raise self._fail(node, frame, f"it asks whether {name_of(item)} is empty")

    def _switch(self, node: ast.expr, frame: Frame) -> bool | None:
        """Whether a switch from before the step is on, which was noted when it was read; None if it is none."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self._switch(node.operand, frame)
            return None if inner is None else not inner
        found: Any = ABSENT
        if isinstance(node, ast.Name) and node.id not in frame.names:
            function = frame.function
            if node.id in function.__code__.co_freevars:
                found = content_of(function.__closure__[function.__code__.co_freevars.index(node.id)])
            elif node.id not in (*function.__code__.co_varnames, *function.__code__.co_cellvars):
                found = function.__globals__.get(node.id, ABSENT)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr != "training":
            owners = frame.names.get(node.value.id, FRESH).outside
            if len(owners) == 1 and not isinstance(getattr(type(owners[0]), node.attr, None), property):
                found = getattr(owners[0], "__dict__", {}).get(node.attr, ABSENT)
        return found if isinstance(found, bool) else None

    def _attribute(self, value: Value, name: str, node: ast.AST, frame: Frame) -> Value:
        if value.varying:
            raise self._fail(node, frame, f"it looks at {value.varying}")
        if name.startswith("__") and not name.endswith("__"):
            # As it is called outside of its class.
            names = [found for found in frame.function.__code__.co_names if found.endswith(name)]
            name = names[0] if len(names) == 1 else name
        found = FRESH
        for item in value.outside:
            found = found.join(self._attribute_of(item, name, node, frame))
        return found

    def _attribute_of(self, item: Any, name: str, node: ast.AST, frame: Frame) -> Value:
        said = ast.unparse(node)
        if isinstance(item, Batch) and name not in CHANGING_METHODS | READING_METHODS:
            # A field, or something of a tensor.
            return Value((item,))
        if isinstance(item, (Batch, Held)) or type(item) in _BUILT_IN:
            return Value((ContainerMethod(item, name),))
        if isinstance(item, Super):
            mro = type(item.owner).__mro__
            for cls in mro[mro.index(item.behind) + 1 :]:
                if name in vars(cls):
                    return self._of_class(item.owner, cls, name, vars(cls)[name], said, node, frame)
        if isinstance(item, (Local, Method, ContainerMethod, KnownMethod, Super)):
            raise self._fail(node, frame, f"it reads {said}")
        if isinstance(item, types.ModuleType):
            if not hasattr(item, name):
                raise self._fail(node, frame, f"it reads {said}, which is not there")
            # One that is made when it is asked for is not there yet.
            present = getattr(item, name)
            return self._read(item, name, present, said, node, frame) if name in vars(item) else Value((present,))
        if isinstance(item, type):
            return self._of_type(item, name, said, node, frame)
        if isinstance(item, dict) and name in item and not hasattr(type(item), name):
            # A dictionary whose entries are attributes.
            return self._read(item, name, item[name], said, node, frame)
        own = getattr(item, "__dict__", {})
        if _is_of_user(type(item).__getattribute__):
            raise self._fail(node, frame, f"it reads {said}, by a __getattribute__ of its own")
        if isinstance(item, Enum) and name in ("name", "value"):
            return FRESH
        if isinstance(item, torch.nn.Module):
            self._use(item)
            for group in ("_parameters", "_buffers"):
                if name in own[group]:
                    return FRESH
            if name in self._knowledge.methods and self._is_known_module(type(item)):
                return Value((KnownMethod(item, name),))
            if name in own["_modules"]:
                return Value((own["_modules"][name],))
        if isinstance(item, Optimizer) and name in ("step", "zero_grad"):
            if name in own:
                # Wrapped by a scheduler, say.
                self._read(item, name, own[name], said, node, frame)
            return Value((Method(getattr(type(item), name), item),))
        classes = type(item).__mro__
        for place, cls in enumerate(classes):
            if name in vars(cls) and (name not in own or isinstance(vars(cls)[name], property)):
                # Whatever is set nearer by hides it from then on (a property is not hidden by the object itself).
                for nearer in (*([] if name in own else [item]), *classes[:place]):
                    self._note_absence(nearer, name)
                return self._of_class(item, cls, name, vars(cls)[name], said, node, frame)
        if name in own:
            return self._read(item, name, own[name], said, node, frame)
        raise self._fail(node, frame, f"it reads {said}, whose origin is not followed")

    def _of_type(self, item: type, name: str, said: str, node: ast.AST, frame: Frame) -> Value:
        for place, cls in enumerate(item.__mro__):
            if name in vars(cls):
                member = vars(cls)[name]
                for nearer in item.__mro__[:place]:
                    self._note_absence(nearer, name)
                read = self._read(cls, name, member, said, node, frame)
                if isinstance(member, staticmethod):
                    return Value((member.__func__,))
                if isinstance(member, classmethod):
                    return Value((Method(member.__func__, item),))
                # What is found in a class of built-in code is called through it.
                return read if isinstance(member, types.FunctionType) else self._as_read(getattr(item, name))
        if not hasattr(item, name):
            raise self._fail(node, frame, f"it reads {said}, which is not there")
        raise self._fail(node, frame, f"it reads {said}, whose origin is not followed")

    @staticmethod
    def _as_read(value: Any) -> Value:
        return FRESH if is_constant(value) or isinstance(value, torch.Tensor) else Value((value,))

    def _of_class(self, owner: Any, cls: type, name: str, member: Any, said: str, node: ast.AST, frame: Frame) -> Value:
        if isinstance(member, property):
            self._read(cls, name, member, said, node, frame)
            if name in self._knowledge.properties and self._knowledge.covers(cls):
                return Value(tuple(self._knowledge.properties[name](owner)))
            if self._knowledge.covers(cls) or member.fget is None:
                raise self._fail(node, frame, f"it reads {said}")
            return self._function(member.fget, owner, [Value((owner,))], {})
        self._read(cls, name, member, said, node, frame)
        if isinstance(member, staticmethod):
            return Value((member.__func__,))
        if isinstance(member, classmethod):
            return Value((Method(member.__func__, cls),))
        if isinstance(member, types.FunctionType):
            return Value((Method(member, owner),))
        if hasattr(type(member), "__get__"):
            raise self._fail(node, frame, f"it reads {said}")
        return self._read(cls, name, member, said, node, frame)

    def _is_known_module(self, cls: type) -> bool:
        return issubclass(cls, torch.nn.Module) and self._knowledge.covers(cls)


def is_constant(value: Any) -> bool:
    """Whether a value can neither change nor be changed."""
    return is_simple(value) and not isinstance(value, (list, dict, set)) and not _has_methods(value)


def _has_methods(value: Any) -> bool:
    """Whether it is one of an enumeration with methods of its own."""
    if not isinstance(value, Enum):
        return False
    members = (member for cls in type(value).__mro__ for name, member in vars(cls).items() if name[:1] != "_")
    return any(_is_of_user(member.fget if isinstance(member, property) else member) for member in members)


def _is_of_user(method: Any) -> bool:
    return isinstance(method, types.FunctionType) and is_of_user(method.__code__.co_filename)


def _chosen(container: Any, key: Any) -> list[Any]:
    """What lies under a key; all, and the keys that are objects, if it is not known."""
    if isinstance(key, (int, str)) and type(container) in (list, tuple, dict, *_OF_MODULES):
        try:
            return [container[key]]
        except (LookupError, TypeError, AttributeError):
            # The code will fail there, if it comes there.
            return []
    return inside(container)
