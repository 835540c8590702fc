"""Where code comes from, and its text."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from typing import Any

from xla_adapters.location import is_of_user
from xla_adapters.replay.outside import Unproven
from xla_adapters.replay.read_facts import is_of_library


def is_own_code(function: Any) -> bool:
    """Whether a function, or one that it wraps, is the user's own."""
    while function is not None:
        if isinstance(function, functools.partial):
            function = function.func
            continue
        function = getattr(function, "__func__", function)
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
    try:
        lines, first = inspect.getsourcelines(function.__code__)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        indent = len(lines[0]) - len(lines[0].lstrip())
    except (OSError, TypeError, SyntaxError):
        raise Unproven(f"the source of {function.__qualname__} cannot be read") from None
    return _node_of(function, tree, first, indent), inspect.getsourcefile(function) or "?", first


def _node_of(function: types.FunctionType, tree: ast.Module, first: int, indent: int) -> ast.FunctionDef | ast.Lambda:
    """Where a function is in the source that was found for it."""
    code = function.__code__
    if code.co_name == "<lambda>":
        begins = min(
            (line, column) for line, _, column, end in code.co_positions() if line and end and column is not None
        )
        found = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Lambda) and (node.body.lineno + first - 1, node.body.col_offset + indent) == begins
        ]
        if len(found) == 1:
            return found[0]
        raise Unproven(f"the source of {function.__qualname__} cannot be told from what else is in its line")
    if isinstance(tree.body[0], ast.FunctionDef) and tree.body[0].name == code.co_name:
        return tree.body[0]
    raise Unproven(f"{function.__qualname__} is no plain function")
