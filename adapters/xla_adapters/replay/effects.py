"""Proves of a step's own Python that a replay may leave it out, by reading its source.

What was there before the step (the model, globals, helper objects) is followed through the code; all that
the step makes itself is free to use. Setting an attribute, changing a list, calling what is not known to be
pure: the first such thing is the reason why the step is traced each time. What the code reads is noted, to be
held against its present value before each replay.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from xla_adapters.replay.calls import Calls, constant_of
from xla_adapters.replay.lookups import COMPUTED, PLAIN, Frame, is_constant
from xla_adapters.replay.outside import (
    FRESH,
    Held,
    Knowledge,
    Local,
    Unproven,
    Value,
    name_of,
)
from xla_adapters.replay.pure_calls import CONTEXTS
from xla_adapters.replay.read_facts import ReadFact, inside, is_of_library
from xla_adapters.replay.sources import source_of

_DEPTH = 24
# Of a loop, until nothing new is bound in it.
_ROUNDS = 16
# Their decorators do nothing beside tensors (`torch.no_grad`).
_DECORATORS = ("torch.",)


class Proof(Calls):
    """Examines functions; what they read is in `facts` then.

    Args:
        knowledge: of the framework around them.

    Attributes:
        facts: what the functions read from outside, as it is now.
    """

    def __init__(self, knowledge: Knowledge) -> None:
        super().__init__(knowledge)
        self._done: dict[Any, Value] = {}
        self._stack: list[Any] = []

    # ---- functions ---------------------------------------------------------------------------------

    def examine(
        self, function: Callable[..., Any], arguments: Sequence[Value] = (), options: dict[str, Value] | None = None
    ) -> Value:
        """Follows a function or bound method.

        Args:
            function: written in Python.
            arguments: given by position, without `self`; the others are the step's own.
            options: given by name.

        Raises:
            Unproven: it cannot be shown to be without effects.
        """
        if isinstance(function, torch.nn.Module):
            return self.examine_module(function, arguments, options)
        given, named = list(arguments), dict(options or {})
        called: Any = function
        while isinstance(called, functools.partial):
            given = [*map(self._as_read, called.args), *given]
            named = {**{name: self._as_read(item) for name, item in called.keywords.items()}, **named}
            self.facts.append(ReadFact.of_contents(called.keywords, inside(called.keywords), "the arguments"))
            called = called.func
        if not isinstance(called, (types.FunctionType, types.MethodType)):
            if not isinstance(called.__call__, types.MethodType):
                raise Unproven(f"{name_of(called)} is no plain function")
            return self._function(called.__call__.__func__, called, [Value((called,)), *given], named)
        owner = getattr(called, "__self__", None)
        own = () if owner is None else (Value((owner,)),)
        return self._function(getattr(called, "__func__", called), owner, [*own, *given], named)

    def _function(self, function: Any, owner: Any, arguments: Sequence[Value], options: dict[str, Value]) -> Value:
        if not isinstance(function, types.FunctionType):
            raise Unproven(f"{name_of(function)} is no plain function")
        while hasattr(function, "__wrapped__") and function.__globals__["__name__"].startswith(_DECORATORS):
            function = function.__wrapped__
        key = (function, id(owner), *arguments, *options.items())
        if key in self._done:
            return self._done[key]
        if key in self._stack:
            # What it returns may be anything that it was given.
            return functools.reduce(Value.join, [*arguments, *options.values()], FRESH)
        if len(self._stack) > _DEPTH:
            raise Unproven(f"{function.__qualname__} calls too deeply to be examined")
        node, file, first = source_of(function)
        self._note_definition(function)
        frame = Frame(function, owner, file, first, {})
        defaults = {
            name: Value((parameter.default,))
            for name, parameter in inspect.signature(function, follow_wrapped=False).parameters.items()
            if parameter.default is not parameter.empty and not is_constant(parameter.default)
        }
        self._bind_arguments(node.args, frame, arguments, options, defaults)
        self._stack.append(key)
        try:
            if isinstance(node, ast.Lambda):
                frame.result = self._value(node.body, frame)
            else:
                self._block(node.body, frame)
        finally:
            self._stack.pop()
        self._done[key] = frame.result
        return frame.result

    def _bind_arguments(
        self,
        spec: ast.arguments,
        frame: Frame,
        arguments: Sequence[Value],
        options: dict[str, Value],
        defaults: dict[str, Value],
    ) -> None:
        names = [item.arg for item in (*spec.posonlyargs, *spec.args)]
        given = dict(zip(names, arguments, strict=False))
        rest = functools.reduce(Value.join, [*arguments[len(names) :], *options.values()], FRESH)
        # `f(*values)` may give any of them.
        anything = options.get("*")
        for name in (*names, *(item.arg for item in spec.kwonlyargs)):
            found = given.get(name, options.get(name, defaults.get(name, FRESH)))
            frame.names[name] = found if anything is None else found.join(anything)
        for extra in (spec.vararg, spec.kwarg):
            if extra is not None:
                frame.names[extra.arg] = rest

    # ---- statements ----------------------------------------------------------------------------------

    def _block(self, body: Sequence[ast.stmt], frame: Frame) -> None:
        for statement in body:
            self._statement(statement, frame)

    def _branches(self, frame: Frame, *bodies: Sequence[ast.stmt]) -> None:
        frame.branches += 1
        for body in bodies:
            self._block(body, frame)
        frame.branches -= 1

    def _loop(self, node: ast.For | ast.While, frame: Frame) -> None:
        """What the end of a loop binds is there at its beginning."""
        for _ in range(_ROUNDS):
            before = {name: value.stands_for() for name, value in frame.names.items()}
            self._branches(frame, node.body)
            if {name: value.stands_for() for name, value in frame.names.items()} == before:
                self._branches(frame, node.orelse)
                return
        raise self._fail(node, frame, "a loop whose variables take too many values to be followed")

    def _statement(self, node: ast.stmt, frame: Frame) -> None:
        if isinstance(node, ast.Assign):
            value = self._value(node.value, frame)
            for target in node.targets:
                self._assign(target, value, frame)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self._assign(node.target, self._value(node.value, frame), frame)
        elif isinstance(node, ast.AugAssign):
            held = self._value(node.target, frame)
            self._refuse_change(held, node, frame)
            self._assign(
                node.target, held.join(self._computed([held, self._value(node.value, frame)], node, frame)), frame
            )
        elif isinstance(node, ast.Return):
            if node.value is not None:
                frame.result = frame.result.join(self._value(node.value, frame))
        elif isinstance(node, ast.Expr):
            self._value(node.value, frame)
        elif isinstance(node, (ast.If, ast.While)):
            self._test(node.test, frame)
            switch = self._switch(node.test, frame)
            if switch is not None and isinstance(node, ast.If):
                self._block(node.body if switch else node.orelse, frame)
            elif isinstance(node, ast.While):
                self._loop(node, frame)
            else:
                self._branches(frame, node.body, node.orelse)
        elif isinstance(node, ast.For):
            self._assign(node.target, self._element(self._value(node.iter, frame), node, frame), frame)
            self._loop(node, frame)
        elif isinstance(node, ast.With):
            for item in node.items:
                entered = self._entered(self._value(item.context_expr, frame), item, frame)
                if item.optional_vars is not None:
                    self._assign(item.optional_vars, entered, frame)
            self._block(node.body, frame)
        elif isinstance(node, ast.Try):
            for handler in node.handlers:
                if handler.name:
                    frame.names[handler.name] = FRESH
            self._branches(frame, node.body, *(handler.body for handler in node.handlers), node.orelse, node.finalbody)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            self._import(node, frame)
        elif isinstance(node, ast.FunctionDef) and not node.decorator_list:
            frame.names[node.name] = Value((Local(node, frame),))
        elif isinstance(node, ast.Assert):
            self._test(node.test, frame)
        elif isinstance(node, ast.Raise):
            for part in (node.exc, node.cause):
                if part is not None:
                    self._value(part, frame)
        elif isinstance(node, ast.Delete) and all(isinstance(target, ast.Name) for target in node.targets):
            pass
        elif not isinstance(node, (ast.Pass, ast.Break, ast.Continue)):
            raise self._fail(node, frame, f"a statement that is not followed: {type(node).__name__.lower()}")

    def _import(self, node: ast.Import | ast.ImportFrom, frame: Frame) -> None:
        """Of a library that is there already, so that nothing happens."""
        for alias in node.names:
            name = alias.name if isinstance(node, ast.Import) else node.module or ""
            module = sys.modules.get(name)
            if module is None or not is_of_library(module) or (isinstance(node, ast.ImportFrom) and node.level):
                raise self._fail(node, frame, f"it imports {name or 'from its package'}")
            if isinstance(node, ast.ImportFrom):
                found = self._attribute_of(module, alias.name, ast.Name(f"{name}.{alias.name}"), frame)
            else:
                found = Value((module if alias.asname else sys.modules[name.split(".")[0]],))
            frame.names[alias.asname or alias.name.split(".")[0]] = found

    def _entered(self, value: Value, node: ast.withitem, frame: Frame) -> Value:
        """What `with` binds; an object's own code around the block is followed."""
        found = Value((), value.varying)
        for item in value.outside:
            if isinstance(item, CONTEXTS):
                # Switched on or off by their attributes.
                for name, held in vars(item).items():
                    self._read(item, name, held, name, node.context_expr, frame)
                continue
            for name in ("__enter__", "__exit__"):
                method = getattr(type(item), name, None)
                if not isinstance(method, types.FunctionType) or self._knowledge.covers(method):
                    raise self._fail(node.context_expr, frame, f"it enters {name_of(item)}")
                entered = self._function(method, item, [Value((item,))], {})
                found = found.join(entered) if name == "__enter__" else found
        return found

    def _assign(self, target: ast.expr, value: Value, frame: Frame) -> None:
        if isinstance(target, ast.Name):
            before = frame.names.get(target.id)
            frame.names[target.id] = value if before is None or not frame.branches else before.join(value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            element = self._element(value, target, frame)
            for item in target.elts:
                self._assign(item.value if isinstance(item, ast.Starred) else item, element, frame)
        elif isinstance(target, ast.Attribute):
            owner = self._value(target.value, frame)
            if owner.outside:
                raise self._fail(target, frame, f"it sets {ast.unparse(target)}")
            self._refuse_keeping(value, target, frame)
        elif isinstance(target, ast.Subscript):
            holder = self._value(target.value, frame)
            if not all(isinstance(item, Held) for item in holder.outside):
                self._refuse_change(holder, target, frame)
            self._refuse_keeping(value, target, frame)
            self._test(target.slice, frame)
        else:
            raise self._fail(target, frame, f"an assignment that is not followed: {ast.unparse(target)}")

    def _refuse_change(self, value: Value, node: ast.AST, frame: Frame) -> None:
        if value.outside:
            raise self._fail(node, frame, f"it changes {name_of(value.outside[0])}")

    def _test(self, node: ast.expr, frame: Frame) -> None:
        value = self._value(node, frame)
        if value.varying:
            raise self._fail(node, frame, f"it looks at {value.varying}")
        self._truth(value, node, frame)

    # ---- expressions ---------------------------------------------------------------------------------

    def _value(self, node: ast.expr, frame: Frame) -> Value:
        if isinstance(node, ast.Name):
            return self._name(node, frame)
        if isinstance(node, ast.Attribute):
            return self._attribute(self._value(node.value, frame), node.attr, node, frame)
        if isinstance(node, ast.Call):
            return self._call(node, frame)
        if isinstance(node, ast.Constant):
            return FRESH
        if isinstance(node, ast.NamedExpr):
            value = self._value(node.value, frame)
            self._assign(node.target, value, frame)
            return value
        if isinstance(node, ast.IfExp):
            self._test(node.test, frame)
            return self._value(node.body, frame).join(self._value(node.orelse, frame))
        if isinstance(node, ast.Lambda):
            return Value((Local(node, frame),))
        if isinstance(node, ast.Subscript):
            index = self._value(node.slice, frame)
            if index.varying:
                raise self._fail(node, frame, f"it looks at {index.varying}")
            return self._element(self._value(node.value, frame), node, frame, constant_of(node.slice))
        if isinstance(node, ast.BoolOp):
            values = [self._value(item, frame) for item in node.values]
            for value in values:
                self._truth(value, node, frame)
            return functools.reduce(Value.join, values, FRESH)
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return _held([self._value(item, frame) for item in node.elts])
        if isinstance(node, ast.Dict):
            # `{**other}` holds what the other one does.
            rest = [self._element(self._value(item, frame), node, frame) for item in _unpacked(node)]
            given = [item for key, item in zip(node.keys, node.values, strict=True) if key is not None]
            keys = [key for key in node.keys if key is not None]
            return _held([*rest, *(self._value(item, frame) for item in (*given, *keys))])
        if isinstance(node, ast.Starred):
            return self._element(self._value(node.value, frame), node, frame)
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            return self._comprehension(node, frame)
        if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Compare, ast.JoinedStr, ast.FormattedValue, ast.Slice)):
            parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
            return self._computed([self._value(part, frame) for part in parts], node, frame)
        raise self._fail(node, frame, f"an expression that is not followed: {ast.unparse(node)}")

    def _computed(self, parts: Sequence[Value], node: ast.AST, frame: Frame) -> Value:
        only_identity = isinstance(node, ast.Compare) and all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops)
        for part in parts:
            if part.varying:
                raise self._fail(node, frame, f"it looks at {part.varying}")
            for item in () if only_identity else part.outside:
                self._special(item, COMPUTED)
                if not isinstance(item, PLAIN):
                    raise self._fail(node, frame, f"it computes with {name_of(item)}")
        return FRESH

    def _comprehension(self, node: Any, frame: Frame) -> Value:
        before = dict(frame.names)
        targets = {
            part.id
            for generator in node.generators
            for part in ast.walk(generator.target)
            if isinstance(part, ast.Name)
        }
        try:
            return self._inside_comprehension(node, frame)
        finally:
            # Its variables are its own.
            for name in targets:
                frame.names.pop(name, None)
                if name in before:
                    frame.names[name] = before[name]

    def _inside_comprehension(self, node: Any, frame: Frame) -> Value:
        for generator in node.generators:
            self._assign(generator.target, self._element(self._value(generator.iter, frame), node, frame), frame)
            for test in generator.ifs:
                self._test(test, frame)
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        return _held([self._value(part, frame) for part in parts])

    def _local(self, local: Local, arguments: Sequence[Value], options: dict[str, Value]) -> Value:
        given = [*arguments, *options.values()]
        key = (id(local.node), *(value.stands_for() for value in given))
        if key in self._stack:
            # What it returns may be anything that it was given.
            return functools.reduce(Value.join, given, FRESH)
        if len(self._stack) > _DEPTH:
            raise self._fail(local.node, local.frame, "it calls too deeply to be examined")
        inner = dataclasses.replace(local.frame, names=dict(local.frame.names), result=FRESH)
        spec = local.node.args
        positional = [item.arg for item in (*spec.posonlyargs, *spec.args)]
        late = dict(zip(reversed(positional), reversed(spec.defaults), strict=False))
        late |= {item.arg: value for item, value in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if value}
        defaults = {name: self._value(value, local.frame) for name, value in late.items()}
        self._bind_arguments(spec, inner, arguments, options, defaults)
        self._stack.append(key)
        try:
            if isinstance(local.node, ast.Lambda):
                return self._value(local.node.body, inner)
            self._block(local.node.body, inner)
        finally:
            self._stack.pop()
        return inner.result


def _held(parts: Sequence[Value]) -> Value:
    inside = functools.reduce(Value.join, parts, FRESH)
    return Value((Held(inside),), inside.varying) if inside.outside else inside


def _unpacked(node: ast.Dict) -> list[ast.expr]:
    return [item for key, item in zip(node.keys, node.values, strict=True) if key is None]
