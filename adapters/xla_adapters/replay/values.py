"""Plain values that can be compared, and kept as a copy."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch

_SIMPLE = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
# What stands where there is nothing.
ABSENT = object()


def is_simple(value: Any, depth: int = 3) -> bool:
    """Whether a value can be compared, and kept as a copy."""
    if type(value) in _SIMPLE:
        return True
    if isinstance(value, (str, int, float)):
        # One of a class of its own may have attributes.
        return isinstance(value, Enum) or not hasattr(value, "__dict__")
    if type(value) in (list, tuple, set, frozenset) and len(value) <= 64:
        return depth > 0 and _are_simple(value, depth - 1)
    if type(value) is dict and len(value) <= 256:
        return depth > 0 and all(type(key) in _SIMPLE for key in value) and _are_simple(value.values(), depth - 1)
    return False


def _are_simple(values: Iterable[Any], depth: int) -> bool:
    return all(is_simple(item, depth) for item in values)


def is_noted(value: Any) -> bool:
    """Whether an attribute of this value may be part of what a trace depends on."""
    return isinstance(value, (torch.Tensor, str, int, float)) or callable(value) or is_simple(value)


def copied(value: Any) -> Any:
    """A copy of a simple value; any other is handed back."""
    if not is_simple(value):
        return value
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(map(copied, value))
    return {key: copied(item) for key, item in value.items()} if type(value) is dict else value


def differs(present: Any, noted: Any) -> bool:
    """Whether a value is another than was noted: simple ones are compared, others are to be the same object."""
    if present is noted:
        return False
    return not is_simple(noted) or not _same(present, noted)


def _same(present: Any, noted: Any) -> bool:
    """Whether two simple values are equal, of one type, and in one order: 2 is not 2.0 in a graph."""
    if present is noted:
        return True
    if type(present) is not type(noted):
        return False
    if type(noted) is dict:
        return list(present) == list(noted) and all(map(_same, present.values(), noted.values()))
    if type(noted) in (list, tuple):
        return len(present) == len(noted) and all(map(_same, present, noted))
    return bool(present == noted) and (noted != 0 or str(present) == str(noted))
