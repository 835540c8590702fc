"""What the names and attributes in a step's code stand for: found in the objects themselves, and noted."""

from __future__ import annotations

import ast
import builtins
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from xla_adapters.replay.facts import ReadFact, is_simple
from xla_adapters.replay.outside import (
    CHANGING_METHODS,
    FRESH,
    Batch,
    ContainerMethod,
    Held,
    Knowledge,
    Local,
    Method,
    Super,
    Unproven,
    Value,
    name_of,
)
from xla_adapters.replay.pure_calls import READING_METHODS

# What functions may be given that do not change it.
PLAIN = (Batch, Held, list, dict, set, tuple, type, torch.nn.Module)


_CONTAINERS = (list, tuple, set, dict, torch.nn.ModuleList, torch.nn.Sequential)


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
        self.facts: list[ReadFact] = []
        self._knowledge = knowledge
        self._noted: set[tuple[int, str]] = set()

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
            return self._read(cell, "cell_contents", cell.cell_contents, node.id, node, frame)
        if node.id in function.__globals__:
            return self._read(function.__globals__, node.id, function.__globals__[node.id], node.id, node, frame)
        builtin = getattr(builtins, node.id, None)
        if builtin is None:
            # A local that no assignment came before: of an enclosing block, or an error when it runs.
            raise self._fail(node, frame, f"the name {node.id} is not followed")
        return Value((builtin,))

    def _read(self, owner: Any, name: str, value: Any, said: str, node: ast.AST, frame: Frame) -> Value:
        if isinstance(value, torch.Tensor):
            if value.device.type != "xla":
                raise self._fail(node, frame, f"it reads {said}, a tensor that is not on the device")
            return FRESH
        if (id(owner), name) not in self._noted:
            self._noted.add((id(owner), name))
            self.facts.append(ReadFact.of(owner, name, value, said))
            self._note_contents(value)
        return FRESH if is_constant(value) else Value((value,))

    def _note_contents(self, value: Any) -> None:
        """Notes what a container holds: code may count it, compare it, or ask whether it is empty."""
        if type(value) not in (list, tuple, set, dict) or is_simple(value) or (id(value), "") in self._noted:
            return
        self._noted.add((id(value), ""))
        inside = list(value.values() if type(value) is dict else value)
        self.facts.append(ReadFact.of_contents(value, inside, name_of(value)))
        for part in inside:
            self._note_contents(part)

    def _element(self, value: Value, node: ast.AST, frame: Frame) -> Value:
        found = Value((), value.varying)
        for item in value.outside:
            if isinstance(item, Held):
                found = found.join(item.value)
            elif isinstance(
                item, (list, tuple, set, dict, torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
            ):
                # Strings, the keys of dictionaries, need not be noted.
                inside = item.values() if isinstance(item, (dict, torch.nn.ModuleDict)) else item
                held = tuple(part for part in inside if not is_constant(part))
                self.facts.append(ReadFact.of_contents(item, list(inside), name_of(item)))
                if any(isinstance(part, torch.Tensor) and part.device.type != "xla" for part in held):
                    raise self._fail(node, frame, f"it reads tensors of {name_of(item)} that are not on the device")
                found = found.join(Value(tuple(part for part in held if not isinstance(part, torch.Tensor))))
            elif isinstance(item, (Batch, torch.nn.Module, Local)) or callable(item):
                found = found.join(Value((item,)))
            else:
                raise self._fail(node, frame, f"it looks into {name_of(item)}")
        return found

    def _attribute(self, value: Value, name: str, node: ast.AST, frame: Frame) -> Value:
        if value.varying:
            raise self._fail(node, frame, f"it looks at {value.varying}")
        found = FRESH
        for item in value.outside:
            found = found.join(self._attribute_of(item, name, node, frame))
        return found

    def _attribute_of(self, item: Any, name: str, node: ast.AST, frame: Frame) -> Value:
        said = ast.unparse(node)
        if isinstance(item, Batch) and name not in CHANGING_METHODS | READING_METHODS:
            # A field, or something of a tensor.
            return Value((item,))
        if isinstance(item, (Batch, Held)) or type(item) in (list, dict, set, tuple):
            return Value((ContainerMethod(item, name),))
        if isinstance(item, Super):
            mro = type(item.owner).__mro__
            for cls in mro[mro.index(item.behind) + 1 :]:
                if name in vars(cls):
                    return self._of_class(item.owner, cls, name, vars(cls)[name], said, node, frame)
        if isinstance(item, (Local, Method, ContainerMethod, Super)):
            raise self._fail(node, frame, f"it reads {said}")
        if isinstance(item, (types.ModuleType, type)):
            if not hasattr(item, name):
                raise self._fail(node, frame, f"it reads {said}, which is not there")
            return self._read(item, name, getattr(item, name), said, node, frame)
        if isinstance(item, dict) and name in item and not hasattr(type(item), name):
            # A dictionary whose entries are attributes.
            return self._read(item, name, item[name], said, node, frame)
        own = getattr(item, "__dict__", {})
        if isinstance(item, torch.nn.Module):
            for group in ("_parameters", "_buffers"):
                if name in own[group]:
                    return FRESH
            if name in self._knowledge.methods and self._is_known_module(type(item)):
                return FRESH
            if name in own["_modules"]:
                return Value((own["_modules"][name],))
        for cls in type(item).__mro__:
            if name in vars(cls) and (name not in own or isinstance(vars(cls)[name], property)):
                return self._of_class(item, cls, name, vars(cls)[name], said, node, frame)
        if name in own:
            return self._read(item, name, own[name], said, node, frame)
        raise self._fail(node, frame, f"it reads {said}, whose origin is not followed")

    def _of_class(self, owner: Any, cls: type, name: str, member: Any, said: str, node: ast.AST, frame: Frame) -> Value:
        if isinstance(member, property):
            if name in self._knowledge.properties and cls.__module__.startswith(self._knowledge.packages):
                return Value(tuple(self._knowledge.properties[name](owner)))
            if cls.__module__.startswith(self._knowledge.packages) or member.fget is None:
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
        return issubclass(cls, torch.nn.Module) and cls.__module__.startswith(self._knowledge.packages)


def is_constant(value: Any) -> bool:
    """Whether a value can neither change nor be changed."""
    return is_simple(value) and not isinstance(value, (list, dict, set))
