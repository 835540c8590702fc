"""`argument_text`: how the user wrote a value that a call gets."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable
from typing import Any

import torch


def argument_text(file: str, line: int, function: Callable[..., Any], index: int) -> str:
    """How a line writes what a function gets, e.g. `batch["image"]` of `batch["image"].float()`.

    Args:
        file, line: where the call is.
        function: what is called.
        index: which of its arguments: of a method the first is what it is called on.

    Returns:
        The text; empty if the line does not tell, as where a statement has several lines or several such calls.
    """
    name = getattr(function, "__name__", "")
    try:
        tree = ast.parse(linecache.getline(file, line).strip())
    except SyntaxError:
        return ""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func) == name]
    if len(calls) != 1:
        return ""
    (call,) = calls
    values = call.args
    if isinstance(call.func, ast.Attribute) and getattr(torch.Tensor, name, None) is function:
        values = [call.func.value, *values]
    return ast.unparse(values[index]) if index < len(values) else ""


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
