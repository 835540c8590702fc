"""`Expressions`: what an expression in a step's code may stand for."""

from __future__ import annotations

import ast
import dataclasses
import functools
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xla_adapters.replay.safety.abstract_values import DATA, MARKERS, At, Frame, Held, Value, either
from xla_adapters.replay.safety.calls import Calls
from xla_adapters.replay.safety.lookups import name_of

_COMPARED: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


class Expressions(Calls):
    """Follows the expressions of a function, and assignments to their names."""

    def value(self, node: ast.expr, frame: Frame) -> Value:
        """What an expression may stand for."""
        at = At(node, frame)
        if isinstance(node, ast.Constant):
            return Value(constant=(node.value,))
        if isinstance(node, ast.Name):
            return self.name(node, at)
        if isinstance(node, ast.Attribute):
            return self.attribute(self.value(node.value, frame), node.attr, at)
        if isinstance(node, ast.Call):
            return self.call(node, at)
        if isinstance(node, ast.Subscript):
            index = self.test(node.slice, frame)
            return self.items(self.value(node.value, frame), at, index.constant)
        if isinstance(node, ast.Starred):
            return self.items(self.value(node.value, frame), at)
        if isinstance(node, ast.IfExp):
            test = self.test(node.test, frame)
            parts = [node.body, node.orelse] if not test.constant else [node.body if test.constant[0] else node.orelse]
            return either([self.value(part, frame) for part in parts])
        if isinstance(node, ast.NamedExpr):
            value = self.value(node.value, frame)
            self.assign(node.target, value, frame)
            return value
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return held([self.value(item, frame) for item in node.elts])
        if isinstance(node, ast.Dict):
            pairs = list(zip(node.keys, node.values, strict=True))
            rest = [self.items(self.value(value, frame), at) for key, value in pairs if key is None]
            return held([*rest, *(self.value(part, frame) for pair in pairs if pair[0] for part in pair if part)])
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            return self._comprehension(node, frame)
        if isinstance(node, ast.Compare):
            return self._compare(node, at)
        if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.JoinedStr, ast.FormattedValue, ast.Slice)):
            return self._operator(node, at)
        raise at.unsafe(f"an expression that is not followed: {at.said}")

    def _operator(self, node: ast.expr, at: At) -> Value:
        parts = [self.value(part, at.frame) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        self.check_computed(parts, at)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and parts[0].constant:
            return Value(constant=(not parts[0].constant[0],))
        if isinstance(node, ast.BoolOp):
            ends = [isinstance(node.op, ast.Or) is bool(part.constant[0]) if part.constant else None for part in parts]
            if None not in ends[:-1]:
                return parts[ends.index(True)] if True in ends[:-1] else parts[-1]
            return either(parts)
        if isinstance(node, ast.JoinedStr) and all(part.constant for part in parts):
            return Value(constant=("".join(str(part.constant[0]) for part in parts),))
        if isinstance(node, ast.FormattedValue) and node.conversion == -1 and len(parts) == 1:
            return Value(constant=parts[0].constant)
        return DATA

    def _compare(self, node: ast.Compare, at: At) -> Value:
        left, *others = parts = [self.value(part, at.frame) for part in (node.left, *node.comparators)]
        if not all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            self.check_computed(parts, at)
        compared = _COMPARED.get(type(node.ops[0]))
        if len(others) == 1 and compared is not None:
            if compared in (operator.eq, operator.ne) and left.constant and others[0].constant:
                return Value(constant=(bool(compared(left.constant[0], others[0].constant[0])),))
            mine, theirs = (_object(value) for value in (left, others[0]))
            if compared in (operator.is_, operator.is_not) and len(mine) == len(theirs) == 1:
                return Value(constant=(compared(mine[0], theirs[0]),))
        return DATA

    def test(self, node: ast.expr, frame: Frame) -> Value:
        """As `value`, for an expression whose value Python looks at (a condition, an index).

        Raises:
            Unsafe: that may run a special method that is not followed.
        """
        value = self.value(node, frame)
        self.check_computed([value], At(node, frame))
        return value

    def check_computed(self, parts: Sequence[Value], at: At) -> None:
        """Checks the operands of operators, conditions and f-strings.

        Raises:
            Unsafe: one is not plain, so that its special methods may run, which are not followed.
        """
        for item in (item for part in parts for item in part.outside):
            if not self.is_plain(item):
                raise at.unsafe(f"it computes with {name_of(item)}")

    def _comprehension(self, node: Any, frame: Frame) -> Value:
        inner = dataclasses.replace(frame, names=dict(frame.names), branches=0)
        for generator in node.generators:
            item = self.items(self.value(generator.iter, inner), At(node, inner))
            self.assign(generator.target, item, inner, is_inner=True)
            for test in generator.ifs:
                self.test(test, inner)
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        return held([self.value(part, inner) for part in parts])

    # ---- assignments -------------------------------------------------------------------------------

    def assign(self, target: ast.expr, value: Value, frame: Frame, *, is_inner: bool = False) -> None:
        """Follows an assignment to a name, to several, to an item, or to `grad`.

        Args:
            target: the left-hand side.
            value: what is assigned.
            frame: the function.
            is_inner: whether the name belongs to a comprehension.

        Raises:
            Unsafe: it changes an object from before the step.
        """
        at = At(target, frame)
        if isinstance(target, ast.Name):
            if not is_inner and target.id not in _local_names(frame.function.__code__):
                raise at.unsafe(f"it sets {target.id}, which is not its own")
            before = frame.names.get(target.id)
            frame.names[target.id] = value if before is None or not frame.branches else either([before, value])
        elif isinstance(target, (ast.Tuple, ast.List, ast.Starred)):
            parts = target.elts if not isinstance(target, ast.Starred) else [target.value]
            item = self.items(value, at) if not isinstance(target, ast.Starred) else value
            for part in parts:
                self.assign(part, item, frame, is_inner=is_inner)
        elif isinstance(target, ast.Subscript):
            holder = self.value(target.value, frame)
            self.test(target.slice, frame)
            if value.outside or not all(isinstance(item, Held) for item in holder.outside):
                raise at.unsafe(f"it sets {at.said}")
        elif not isinstance(target, ast.Attribute) or target.attr != "grad" or self.value(target.value, frame).outside:
            raise at.unsafe(f"it sets {at.said}")


@functools.lru_cache(maxsize=1024)
def _local_names(code: types.CodeType) -> frozenset[str]:
    return frozenset((*code.co_varnames, *code.co_cellvars))


def _object(value: Value) -> tuple[Any, ...]:
    """The object or constant that a value certainly is, in a tuple; empty if it may be another one."""
    if not value.exact or any(isinstance(item, MARKERS) for item in value.outside):
        return ()
    # Other constants may be equal without being the same object.
    is_single = bool(value.constant) and type(value.constant[0]) in (bool, type(None))
    return value.constant if is_single else value.outside


def held(parts: Sequence[Value]) -> Value:
    """A container that the step makes of these values."""
    inside = either(parts)
    return Value((Held(inside),)) if inside.outside else DATA
