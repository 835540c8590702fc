"""Where code comes from, and its text."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import os
import time
import types
from typing import Any

from xla_adapters.location import is_of_user
from xla_adapters.replay.outside import Unproven
from xla_adapters.replay.read_facts import is_of_library

# What was written to since then may not be what runs.
_BEGAN = time.time()


def is_own_code(function: Any) -> bool:
    """Whether a function, or one that it wraps, is the user's own."""
    while function is not None:
        if isinstance(function, functools.partial):
            function = function.func
            continue
        if hasattr(function, "__func__"):
            function = function.__func__
            continue
        code = getattr(function, "__code__", None)
        if code is None:
            called = type(function)
            return not isinstance(function, types.BuiltinFunctionType) and not is_of_library(called)
        if is_of_user(code.co_filename):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def source_of(function: types.FunctionType) -> tuple[ast.FunctionDef | ast.Lambda, str, int]:
    """A function's source, its file, and the line that the source begins with.

    Raises:
        Unproven: it cannot be read, or holds something else.
    """
    return _source_of(function.__code__, function.__qualname__, function.__code__.co_filename)


# Whoever edits a file while its code runs changes nothing of what was read before. Codes of two files may be equal.
@functools.lru_cache(maxsize=4096)
def _source_of(code: types.CodeType, name: str, origin: str) -> tuple[ast.FunctionDef | ast.Lambda, str, int]:
    try:
        lines, first = inspect.getsourcelines(code)
        tree = _parsed(lines)
    except (OSError, TypeError, SyntaxError):
        raise Unproven(f"the source of {name} cannot be read") from None
    file = inspect.getsourcefile(code) or origin
    if _was_edited(code, file):
        raise Unproven(f"{file} was edited after {name} was loaded from it")
    return _node_of(code, name, tree, first), file, first


def _parsed(lines: list[str]) -> ast.Module:
    if not lines[0][:1].isspace():
        return ast.parse("".join(lines))
    # Not taken back to the margin: text that runs over several lines may begin there.
    (block,) = ast.parse("if True:\n" + "".join(lines)).body
    assert isinstance(block, ast.If)
    tree = ast.Module(block.body, [])
    ast.increment_lineno(tree, -1)
    return tree


def _was_edited(code: types.CodeType, file: str) -> bool:
    """Whether a file holds other code by now than what was loaded from it."""
    try:
        edited = os.stat(file).st_mtime
    except OSError:
        # Typed in: its text is kept with it.
        return False
    return edited > _BEGAN and not any(_same_code(code, other) for other in _codes_in(file, edited))


@functools.lru_cache(maxsize=64)
def _codes_in(file: str, edited: float) -> list[types.CodeType]:
    try:
        found = [compile("".join(linecache.getlines(file)), file, "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):
        return []
    for code in found:
        found.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return found


def _same_code(code: types.CodeType, other: types.CodeType) -> bool:
    return (
        code.co_name == other.co_name
        and code.co_firstlineno == other.co_firstlineno
        and code.co_code == other.co_code
        and code.co_names == other.co_names
        and len(code.co_consts) == len(other.co_consts)
        and all(map(_same_constant, code.co_consts, other.co_consts))
    )


def _same_constant(constant: Any, other: Any) -> bool:
    if isinstance(constant, types.CodeType) and isinstance(other, types.CodeType):
        return _same_code(constant, other)
    return type(constant) is type(other) and repr(constant) == repr(other)


def _node_of(code: types.CodeType, name: str, tree: ast.Module, first: int) -> ast.FunctionDef | ast.Lambda:
    """Where a function is in the source that was found for it."""
    if code.co_name == "<lambda>":
        positions = ((line, column) for line, _, column, end in code.co_positions() if line and end)
        begins = min((place for place in positions if place[1] is not None), default=None)
        found = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Lambda) and (node.body.lineno + first - 1, node.body.col_offset) == begins
        ]
        if len(found) == 1:
            return found[0]
        raise Unproven(f"the source of {name} cannot be told from what else is in its line")
    if isinstance(tree.body[0], ast.FunctionDef) and tree.body[0].name == code.co_name:
        return tree.body[0]
    raise Unproven(f"{name} is no plain function")
