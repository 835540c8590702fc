"""What a call in a step's code does: of the user's own code, of libraries, of containers."""

from __future__ import annotations

import ast
import dataclasses
import functools
import types
from typing import Any

import torch
from torch.optim import Optimizer

from xla_adapters.replay.library_calls import LibraryCalls
from xla_adapters.replay.lookups import COMPUTED, PLAIN, SPECIAL, Frame
from xla_adapters.replay.outside import (
    CHANGING_METHODS,
    FRESH,
    Batch,
    ContainerMethod,
    Held,
    KnownMethod,
    Local,
    Method,
    Super,
    Value,
    is_record,
    name_of,
)
from xla_adapters.replay.pure_calls import READING_METHODS, is_pure
from xla_adapters.replay.read_facts import has_attribute
from xla_adapters.replay.sources import is_own_code

# Built-in functions that call what they are given.
_CALLING = (
    map,
    filter,
    max,
    min,
    sorted,
    functools.reduce,
    str,
    repr,
    format,
    int,
    float,
    sum,
    abs,
    round,
    divmod,
    pow,
    torch.func.functional_call,
)
_APPLY = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]


class Calls(LibraryCalls):
    """Follows calls, or refuses them."""

    def _value(self, node: ast.expr, frame: Frame) -> Value:
        raise NotImplementedError

    def _local(self, local: Local, arguments: list[Value], options: dict[str, Value]) -> Value:
        raise NotImplementedError

    def _call(self, node: ast.Call, frame: Frame) -> Value:
        if isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args and "super" not in frame.names:
            return Value((Super(frame.owner, self._defining(node, frame)),))
        called = self._value(node.func, frame)
        arguments = [self._value(argument, frame) for argument in node.args]
        options = {item.arg or f"**{index}": self._value(item.value, frame) for index, item in enumerate(node.keywords)}
        given = functools.reduce(Value.join, [*arguments, *options.values()], FRESH)
        if any(isinstance(argument, ast.Starred) for argument in node.args) or any(
            not item.arg for item in node.keywords
        ):
            options["*"] = given
        if not called.outside:
            self._hand_over(given, called.varying, node, frame)
            # A method of something that the step made: only those of containers hand out what they are given.
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if name in CHANGING_METHODS:
                self._refuse_keeping(given, node, frame)
            return given if name in CHANGING_METHODS | READING_METHODS else FRESH
        return functools.reduce(
            Value.join, [self._call_of(item, arguments, options, given, node, frame) for item in called.outside]
        )

    def _call_of(
        self, item: Any, arguments: list[Value], options: dict[str, Value], given: Value, node: ast.Call, frame: Frame
    ) -> Value:
        if isinstance(item, Local):
            return self._local(item, arguments, options)
        if isinstance(item, Batch):
            self._hand_over(given, "", node, frame)
            return given
        if isinstance(item, KnownMethod):
            self._hand_over(given, "", node, frame)
            return FRESH
        if (item is hasattr or item is getattr) and len(node.args) > 1:
            return self._asked(item, node, arguments, frame)
        if isinstance(item, functools.partial) and not is_own_code(item):
            self._note_held(item.keywords, node, frame)
            held = [*map(self._as_read, item.args)]
            named = {name: self._as_read(value) for name, value in item.keywords.items()}
            given = functools.reduce(Value.join, [*held, *named.values()], given)
            return self._call_of(item.func, [*held, *arguments], {**named, **options}, given, node, frame)
        function = item.function if isinstance(item, Method) else item
        owner = item.owner if isinstance(item, Method) else getattr(item, "__self__", None)
        function = getattr(function, "__func__", function)
        # A partial has no name.
        name = getattr(function, "__name__", "")
        known = self._knowledge.calls.get(function) if _hashable(function) else None
        if isinstance(item, torch.nn.Module):
            self._use(item)
            return self.examine_module(item, arguments, options)
        if isinstance(owner, Optimizer) and (name == "step" or (name == "zero_grad" and not is_own_code(function))):
            # The optimizer's own part of a step is known otherwise (`UpdateRecipe`).
            self._hand_over(given, "", node, frame)
            return FRESH
        if isinstance(owner, torch.nn.Module) and name == "forward" and not is_own_code(function):
            self._hand_over(given, "", node, frame)
            self._parts(owner)
            return FRESH
        if isinstance(owner, torch.nn.Module) and self._is_own_super(node, frame) and not is_own_code(function):
            # Of the method that is followed here: a library's code calls it, and would have called that one.
            self._hand_over(given, "", node, frame)
            return FRESH
        if function is _APPLY and not isinstance(item, Method):
            raise self._fail(node, frame, f"it calls {ast.unparse(node.func)}")
        if function is _APPLY:
            return self._differentiated(owner, arguments)
        own_code = isinstance(function, types.FunctionType) and not is_pure(function)
        if known is None and own_code and not self._knowledge.covers(function):
            own = [Value((owner,))] if owner is not None else []
            return self._function(function, owner, [*own, *arguments], options)
        if known is None and not isinstance(item, type) and is_own_code(type(item).__call__):
            # An object that is called as a function.
            return self._function(type(item).__call__, item, [Value((item,)), *arguments], options)
        self._hand_over(given, "", node, frame, known=known is not None, calls=function in _CALLING)
        if known is not None:
            return Value(tuple(known(owner)))
        if isinstance(item, ContainerMethod):
            if isinstance(item.container, Held) and item.name in CHANGING_METHODS:
                self._refuse_keeping(given, node, frame)
                return item.container.value
            if item.name in READING_METHODS:
                return self._element(Value((item.container,)), node, frame)
            raise self._fail(node, frame, f"it changes {name_of(item.container)} by {item.name}")
        if is_record(item):
            if any(isinstance(part, torch.nn.Module) for part in given.outside):
                # What is read of a record is looked for in what it was given.
                raise self._fail(node, frame, f"it puts a module into {name_of(item)}")
            return given
        if is_pure(function):
            # A sorted list of modules is one of modules.
            return given if isinstance(function, type) or getattr(function, "__module__", "") == "builtins" else FRESH
        if isinstance(item, type) and self._is_known_module(item):
            return given
        if isinstance(item, type) and dataclasses.is_dataclass(item) and self._knowledge.covers(item):
            # A library's record.
            return given
        raise self._fail(node, frame, f"it calls {ast.unparse(node.func)}")

    def _asked(self, function: Any, node: ast.Call, arguments: list[Value], frame: Frame) -> Value:
        """`hasattr` or `getattr`."""
        name = constant_of(node.args[1])
        if not isinstance(name, str):
            raise self._fail(node, frame, f"it calls {ast.unparse(node)}")
        for owner in arguments[0].outside:
            if not isinstance(owner, (Batch, Held, torch.nn.Module)) and hasattr(type(owner), "__getattr__"):
                raise self._fail(node, frame, f"it asks {name_of(owner)}, which has a __getattr__ of its own")
        there = self._note_presence(arguments[0], name)
        if function is hasattr:
            return Value((), arguments[0].varying)
        owners = [item for item in arguments[0].outside if isinstance(item, (Batch, Held)) or has_attribute(item, name)]
        found = self._attribute(Value(tuple(owners), arguments[0].varying), name, node, frame)
        return (
            functools.reduce(Value.join, arguments[2:], found)
            if len(owners) < len(arguments[0].outside) or not there
            else found
        )

    def _hand_over(
        self, given: Value, varying: str, node: ast.Call, frame: Frame, *, known: bool = False, calls: bool = False
    ) -> None:
        """Something that is not followed gets these values; what can be called may be called.

        Args:
            given, varying, node, frame: what, and where.
            known: whether the one who gets them is known to leave them as they are.
            calls: whether it may call modules and classes, too.
        """
        if given.varying or varying:
            raise self._fail(node, frame, f"it looks at {given.varying or varying}")
        for part in given.outside:
            if isinstance(part, torch.nn.Module):
                self._use(part)
            if isinstance(part, (Local, Method, types.FunctionType)) or (
                calls and isinstance(part, (torch.nn.Module, type))
            ):
                self._call_of(part, [], {}, FRESH, node, frame)
            elif isinstance(part, Held):
                self._hand_over(part.value, "", node, frame, known=known, calls=calls)
            elif not known and not isinstance(part, PLAIN):
                raise self._fail(node, frame, f"it hands {name_of(part)} to {ast.unparse(node.func)}")
            elif not known:
                self._special(part, COMPUTED if calls else SPECIAL)

    @staticmethod
    def _is_own_super(node: ast.Call, frame: Frame) -> bool:
        """Whether it is `super().name(...)` in a method of that name."""
        called = node.func.value if isinstance(node.func, ast.Attribute) else None
        return (
            isinstance(called, ast.Call)
            and isinstance(called.func, ast.Name)
            and called.func.id == "super"
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == frame.function.__name__
        )

    def _defining(self, node: ast.AST, frame: Frame) -> type:
        for cls in type(frame.owner).__mro__:
            member = vars(cls).get(frame.function.__name__)
            if getattr(member, "__func__", member) is frame.function:
                return cls
        raise self._fail(node, frame, "super() of a function that is no method")

    def _refuse_keeping(self, value: Value, node: ast.AST, frame: Frame) -> None:
        """What is put into something that the step made could be changed through it, or looked at."""
        if value.varying:
            raise self._fail(node, frame, f"it looks at {value.varying}")
        for item in value.outside:
            if not isinstance(item, (torch.nn.Module, type)):
                raise self._fail(node, frame, f"it puts {name_of(item)} into a container")


def constant_of(node: ast.expr) -> Any:
    """The value of an expression that is a constant, or None."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        return -node.operand.value if isinstance(node.operand.value, int) else None
    return node.value if isinstance(node, ast.Constant) else None


def _hashable(value: Any) -> bool:
    return type(value).__hash__ is not None
