"""Copies and comparison of nested Python containers, for what an optimizer stores on the host."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

from xla_adapters.utils.nested_values import is_simple

_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque, tuple, bytearray)
_NESTING = 8


def is_container(value: Any) -> bool:
    """Whether a value is one of Python's own containers, no subclass of them."""
    return type(value) in _CONTAINERS


def copied(value: Any, depth: int = _NESTING) -> Any:
    """A copy of nested containers; items that are no containers are shared."""
    kind = type(value)
    if not depth or kind not in _CONTAINERS:
        return value
    if kind is tuple:
        items = tuple(copied(item, depth - 1) for item in value)
        return value if all(map(_is, items, value)) else items
    copy = value.copy()
    if isinstance(copy, dict):
        for key, item in copy.items():
            copy[key] = copied(item, depth - 1)
    elif isinstance(copy, (list, deque)):
        for index, item in enumerate(value):
            copy[index] = copied(item, depth - 1)
    return copy


def same(left: Any, right: Any, depth: int = _NESTING) -> bool:
    """Whether nested containers have equal items."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, (set, bytearray)) or is_simple(left, 0):
        return bool(left == right)
    if not depth or not is_container(left) or len(left) != len(right):
        return False
    if isinstance(left, dict):
        return all(map(_is_same, left, right)) and all(
            same(mine, theirs, depth - 1) for mine, theirs in zip(left.values(), right.values(), strict=True)
        )
    return all(same(mine, theirs, depth - 1) for mine, theirs in zip(left, right, strict=True))


def _is(left: Any, right: Any) -> bool:
    return left is right


def _is_same(left: Any, right: Any) -> bool:
    return same(left, right, 1)
