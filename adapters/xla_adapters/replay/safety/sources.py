"""The source of a function, as a syntax tree."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import os
import time
import types
from typing import Any

from xla_adapters.replay.safety.abstract import Unsafe

# The code of files that were changed after this may differ from the code that runs.
_BEGAN = time.time()


def source_of(function: types.FunctionType) -> tuple[ast.FunctionDef | ast.Lambda, str, int]:
    """The syntax tree of a function, its file, and the line where its source begins.

    Raises:
        Unsafe: the source cannot be read, or may not be what runs.
    """
    code = function.__code__
    # For files that only the module's loader can read, as those in archives.
    linecache.lazycache(code.co_filename, function.__globals__)
    return _source_of(code, function.__qualname__, code.co_filename)


# Cached, so that a file that is edited later does not matter. The file is part of the key, because code objects of two
# files may be equal.
@functools.lru_cache(maxsize=4096)
def _source_of(code: types.CodeType, name: str, file: str) -> tuple[ast.FunctionDef | ast.Lambda, str, int]:
    try:
        lines = _lines_of(code)
        is_indented = lines[0][:1].isspace()
        # Not dedented: that would change the text of multi-line strings.
        tree = ast.parse(("if True:\n" if is_indented else "") + "".join(lines))
    except (OSError, TypeError, SyntaxError):
        raise Unsafe(f"the source of {name} cannot be read") from None
    if os.path.exists(file) and os.stat(file).st_mtime > _BEGAN:
        raise Unsafe(f"{file} was written to after this process began: what runs may be something else")
    ast.increment_lineno(tree, -is_indented)
    first = code.co_firstlineno
    if code.co_name == "<lambda>":
        places = ((line, column) for line, _, column, end in code.co_positions() if line and column is not None and end)
        begins = min(places, default=None)
        lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
        found: list[Any] = [node for node in lambdas if (node.body.lineno + first - 1, node.body.col_offset) == begins]
    else:
        found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == code.co_name][:1]
    if len(found) != 1:
        raise Unsafe(f"the source of {name} cannot be told from what else is in its lines")
    return found[0], file, first


def _lines_of(code: types.CodeType) -> list[str]:
    # inspect.getsourcelines would look for the module first: for the files of all modules that are imported.
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    if not lines:
        raise OSError
    return inspect.getblock(lines)
