"""`Lookups`: what names, items and attributes in a step's code stand for."""

from __future__ import annotations

import ast
import builtins
import types
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from xla_adapters.replay.safety.abstract_values import (
    DATA,
    MARKERS,
    At,
    Batch,
    DataMethod,
    FrameworkModel,
    Held,
    Method,
    Super,
    Value,
    Varying,
    either,
)
from xla_adapters.replay.safety.allowlist import CALLABLE_BUILTINS, METHODS
from xla_adapters.replay.safety.guards import ReadGuards, content_of, inside
from xla_adapters.replay.safety.trusted import is_trusted, is_users_class, lookup
from xla_adapters.utils.nested_values import ABSENT, CONTAINERS, is_constant, is_plain_enum, is_simple

MODULE_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)
_ITERATING = ("__iter__", "__getitem__", "__len__", "keys", "values", "items")


class Lookups:
    """Finds the objects that the code reads, in the objects themselves, and guards them.

    Args:
        framework: describes the framework around the code.

    Attributes:
        guards: on what the code reads from outside of the step.
        modules: the modules that it uses, by `id`.
        tensors: the tensors from before the step that it reads and that are in no module, by `id`.
    """

    def __init__(self, framework: FrameworkModel) -> None:
        self.guards = ReadGuards()
        self.modules: dict[int, nn.Module] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        # Tensors that the step moves to the device and sets as the attribute that they are.
        self.moved: dict[int, torch.Tensor] = {}
        self._framework = framework
        # Containers of plain values, by `id`. They are referenced, so that no other object gets their `id`.
        self._plain: dict[int, Any] = {}

    def is_plain(self, item: Any) -> bool:
        """Whether operators and functions can use an object without running code that is not followed."""
        if isinstance(item, Held):
            return all(map(self.is_plain, item.value.outside))
        return isinstance(item, (Batch, DataMethod)) or is_plain_enum(item) or id(item) in self._plain

    # ---- names -------------------------------------------------------------------------------------

    def name(self, node: ast.Name, at: At) -> Value:
        """What a name stands for."""
        frame, name = at.frame, node.id
        if name in frame.names:
            return frame.names[name]
        code = frame.function.__code__
        if name in code.co_freevars:
            cell = frame.function.__closure__[code.co_freevars.index(name)]
            self.guards.cell(cell, name)
            return self.read(content_of(cell), name, at)
        if name in code.co_varnames or name in code.co_cellvars:
            raise at.unsafe(f"it reads {name} before it is set")
        self.guards.entry(frame.function.__globals__, name, name)
        if name in frame.function.__globals__:
            return self.read(frame.function.__globals__[name], name, at)
        self.guards.entry(vars(builtins), name, name)
        builtin = getattr(builtins, name, ABSENT)
        if builtin in CALLABLE_BUILTINS or (isinstance(builtin, type) and issubclass(builtin, BaseException)):
            return Value((builtin,))
        raise at.unsafe(f"it uses {name}")

    def read(self, value: Any, said: str, at: At) -> Value:
        """The value for an object from outside of the step. The caller guards where it was found.

        Args:
            value: the object.
            said: its expression, for messages.
            at: where it is read.

        Raises:
            Unsafe: it is a tensor on the host or of a subclass, or it is absent.
        """
        if is_constant(value):
            return Value(constant=(value,))
        if isinstance(value, torch.Tensor):
            if id(value) in self.moved and value.device.type == "cpu":
                return DATA
            if value.device.type == "cpu":
                raise at.unsafe(f"it reads {said}, a tensor that is not on the device")
            if type(value) not in (torch.Tensor, nn.Parameter):
                raise at.unsafe(f"it reads {said}, a {type(value).__name__}")
            self.guards.tensor(value, said)
            self.tensors.setdefault(id(value), value)
            return DATA
        if type(value) in CONTAINERS:
            self._container(value, said, at)
        elif isinstance(value, nn.Module):
            self.modules.setdefault(id(value), value)
        elif value is ABSENT:
            raise at.unsafe(f"it reads {said}, which is not there")
        return Value((value,))

    def _container(self, value: Any, said: str, at: At, depth: int = 8) -> None:
        """Guards the items of a container, and those of containers in it."""
        self.guards.contents(value, said)
        if is_simple(value):
            self._plain[id(value)] = value
            return
        for item in inside(value):
            if type(item) in CONTAINERS:
                if not depth:
                    raise at.unsafe(f"it reads {said}, which nests too deeply to be compared")
                self._container(item, said, at, depth - 1)

    # ---- items -------------------------------------------------------------------------------------

    def items(self, value: Value, at: At, key: tuple[Any, ...] = ()) -> Value:
        """What an item of a container may be; with a known key, the item of that key."""
        return either(self._items(item, at, key) for item in value.outside).vaguely(value)

    def _items(self, item: Any, at: At, key: tuple[Any, ...]) -> Value:
        if isinstance(item, (Held, Batch, DataMethod)):
            return item.value if isinstance(item, Held) else Value((item,)) if isinstance(item, Batch) else DATA
        if isinstance(item, MODULE_CONTAINERS):
            if not all(is_trusted(getattr(type(item), name)) for name in _ITERATING if hasattr(type(item), name)):
                raise at.unsafe(f"it looks into {name_of(item)}, by a method of its own")
            if isinstance(item, (nn.ParameterList, nn.ParameterDict)):
                return DATA
        elif type(item) not in CONTAINERS:
            raise at.unsafe(f"it looks into {name_of(item)}")
        held = inside(item)
        if key and type(key[0]) in (int, str) and type(item) not in (set, frozenset):
            try:
                held = [item[key[0]]]
            except (LookupError, TypeError):
                raise at.unsafe(f"{name_of(item)} has no {key[0]!r}") from None
        elif isinstance(item, nn.ModuleDict):
            held = list(item.children())
        return either(self.read(part, name_of(item), at) for part in held)

    # ---- attributes --------------------------------------------------------------------------------

    def attribute(self, value: Value, name: str, at: At) -> Value:
        """What an attribute stands for."""
        if name.startswith("__"):
            raise at.unsafe(f"it reads {at.said}")
        if not value.outside:
            return Value((DataMethod(value, name),)) if name in METHODS else DATA
        return either(self.attribute_of(item, name, at) for item in value.outside).vaguely(value)

    def attribute_of(self, item: Any, name: str, at: At) -> Value:
        """An attribute of one object."""
        if name in METHODS and (isinstance(item, (Batch, Held)) or type(item) in CONTAINERS):
            return Value((DataMethod(Value((item,)), name),))
        if isinstance(item, Batch) and name.startswith("_"):
            raise at.unsafe(f"it reads {at.said}")
        if isinstance(item, (Batch, Held)):
            return self.items(Value((item,)), at)
        if is_plain_enum(item) and name in ("name", "value"):
            self.guards.entry(vars(item), f"_{name}_", at.said)
            return self.read(getattr(item, name), at.said, at)
        if isinstance(item, Super):
            return self._member(item.owner, item.after, name, at)
        if isinstance(item, types.ModuleType):
            if name not in vars(item) and not is_trusted(item):
                raise at.unsafe(f"it reads {at.said}, which its module makes when it is asked")
            if name not in vars(item) and hasattr(type(item), name):
                raise at.unsafe(f"it reads {at.said}, which its module computes when it is asked")
            self.guards.kind(item, at.said)
            self.guards.entry(vars(item), name, at.said)
            return self.read(vars(item)[name] if name in vars(item) else getattr(item, name, ABSENT), at.said, at)
        if isinstance(item, type):
            return self._of_type(item, name, at)
        if isinstance(item, (*MARKERS, types.FunctionType)):
            raise at.unsafe(f"it reads {at.said}")
        return self._of_object(item, name, at)

    def _of_type(self, item: type, name: str, at: At) -> Value:
        if is_users_class(type(item)):
            raise at.unsafe(f"it reads {at.said}, of a class with a metaclass of its own")
        self.guards.member(item, name, at.said)
        member = lookup(item, name)
        if isinstance(member, (staticmethod, classmethod)):
            inner = member.__func__
            return Value((inner if isinstance(member, staticmethod) else Method(inner, item),))
        if hasattr(type(member), "__get__") and not isinstance(member, types.FunctionType):
            if not is_trusted(member):
                raise at.unsafe(f"it reads {at.said}, by a descriptor")
            member = getattr(item, name)
        return self.read(member, at.said, at)

    def _of_object(self, item: Any, name: str, at: At) -> Value:
        if name == "training" and isinstance(item, nn.Module):
            # Guarded by the snapshot of the module; a step may set it before anything else.
            return DATA
        cls, own = type(item), getattr(item, "__dict__", {})
        member = lookup(cls, name)
        if isinstance(item, dict) and is_trusted(cls) and name in item and member is ABSENT:
            # A framework's dictionary whose entries can be read as attributes (Lightning's hyper-parameters).
            self.guards.contents(item, at.said)
            return self.read(item[name], at.said, at)
        for hook in ("__getattr__", "__getattribute__"):
            if (method := lookup(cls, hook)) is not ABSENT and not is_trusted(method):
                raise at.unsafe(f"it reads {at.said}, by a {hook} of its own")
        self.guards.kind(item, at.said)
        if isinstance(item, Optimizer) and name == "step" and is_trusted(member):
            # A wrapper on the object (a scheduler's, for example) is checked with the update.
            self.guards.member(cls, name, at.said)
            return Value((Method(member, item),))
        is_descriptor = hasattr(type(member), "__set__") or hasattr(type(member), "__delete__")
        if not is_descriptor:
            self.guards.entry(own, name, at.said)
        if is_descriptor or name not in own:
            if isinstance(item, nn.Module) and member is ABSENT:
                return self._of_module(item, name, at)
            return self._member(item, None, name, at)
        self.guards.member(cls, name, at.said)
        return self.read(own[name], at.said, at)

    def _of_module(self, item: nn.Module, name: str, at: At) -> Value:
        self.modules.setdefault(id(item), item)
        self.guards.member(type(item), name, at.said)
        for group in ("_parameters", "_buffers", "_modules"):
            entries: dict[str, Any] = vars(item)[group]
            if name in entries:
                if group != "_modules" and isinstance(entries[name], torch.Tensor):
                    # Guarded by the snapshot of the module.
                    return DATA
                self.guards.entry(entries, name, at.said)
                return self.read(entries[name], at.said, at)
        raise at.unsafe(f"it reads {at.said}, which is not there")

    def _member(self, owner: Any, after: type | None, name: str, at: At) -> Value:
        """What an attribute of an object's class stands for; with `after`, only of the classes after that one."""
        classes = type(owner).__mro__
        bases = classes if after is None else classes[classes.index(after) + 1 :]
        cls = next((base for base in bases if name in vars(base)), None)
        if cls is None:
            raise at.unsafe(f"it reads {at.said}, which is not there")
        self.guards.code_of(owner if isinstance(owner, type) else type(owner))
        self.guards.member(type(owner) if after is None else cls, name, at.said)
        member = vars(cls)[name]
        if isinstance(member, property):
            returned = self._framework.properties.get(name)
            if returned is None or member.fget is None or not is_trusted(member.fget):
                raise at.unsafe(f"it reads the property {at.said}")
            self.guards.returned(returned, owner, at.said)
            return either(self.read(item, at.said, at) for item in returned(owner))
        if isinstance(member, staticmethod):
            return Value((member.__func__,))
        if isinstance(member, (types.FunctionType, classmethod)) or (
            isinstance(owner, Optimizer) and is_trusted(member)
        ):
            inner = getattr(member, "__func__", member)
            return Value((Method(inner, type(owner) if isinstance(member, classmethod) else owner),))
        if hasattr(type(member), "__get__"):
            raise at.unsafe(f"it reads {at.said}, by a descriptor")
        return self.read(member, at.said, at)


def name_of(item: Any) -> str:
    """The name of an object for messages."""
    if isinstance(item, (Batch, Held)):
        return "the batch" if isinstance(item, Batch) else "a container with objects from before the step"
    if isinstance(item, Varying):
        return f"{item.name}, which differs from step to step"
    item = item.function if isinstance(item, Method) else item
    if isinstance(item, (type, types.FunctionType, types.BuiltinFunctionType)):
        return str(item.__qualname__)
    return f"a {type(item).__qualname__} from before the step"
