"""Simple values: constants, and Python's built-in containers of them. They can be copied, and compared by value."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Iterable
from enum import Enum
from typing import Any

import numpy as np
import torch

# Exact types: an instance of a subclass may carry code and attributes.
_CONSTANTS = frozenset(
    {
        *(bool, int, float, complex, str, bytes, range, type(None), type(...), type(NotImplemented)),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    }
)
_MAPPINGS = frozenset({dict, OrderedDict})
_SEQUENCES = frozenset({list, tuple})
_SETS = frozenset({set, frozenset})
CONTAINERS = _MAPPINGS | _SEQUENCES | _SETS
_DEPTH, _LARGEST = 8, 4096
# Marks a missing value, where None is a valid one.
ABSENT = object()


def is_constant(value: Any) -> bool:
    """Whether a value is a number, a string or the like (exactly of that type), or a numpy scalar."""
    return type(value) in _CONSTANTS or (isinstance(value, np.generic) and type(value).__module__ == "numpy")


def is_plain_enum(value: Any) -> bool:
    """Whether a value is a member of an enumeration without methods."""
    return isinstance(value, Enum) and _is_plain_enumeration(type(value))


@functools.lru_cache(maxsize=1024)
def _is_plain_enumeration(cls: type) -> bool:
    own = [
        member for base in cls.__mro__ if base.__module__ not in ("enum", "builtins") for member in vars(base).values()
    ]
    code = [member for member in own if isinstance(member, (types.FunctionType, property, classmethod, staticmethod))]
    # The enum module itself adds methods to each enumeration.
    return all(getattr(member, "__module__", "") == "enum" for member in code)


def is_simple(value: Any, depth: int = _DEPTH) -> bool:
    """Whether a value is a constant, or a built-in container of simple values (not too deep or large)."""
    kind = type(value)
    if is_constant(value) or is_plain_enum(value):
        return True
    if kind not in CONTAINERS or not depth or len(value) > _LARGEST:
        return False
    if kind in _MAPPINGS:
        return all(map(is_constant, value)) and _are_simple(value.values(), depth - 1)
    return _are_simple(value, depth - 1)


def _are_simple(values: Iterable[Any], depth: int) -> bool:
    return all(is_simple(item, depth) for item in values)


def copied(value: Any) -> Any:
    """A copy of a simple value; any other value is returned as it is."""
    if type(value) not in CONTAINERS or not is_simple(value):
        return value
    if type(value) in _MAPPINGS:
        return type(value)((key, copied(item)) for key, item in value.items())
    return type(value)(map(copied, value))


def differs(present: Any, noted: Any) -> bool:
    """Whether a value differs from an earlier one: simple values are compared, others must be the same object."""
    if present is noted:
        return False
    return not is_simple(noted) or not same(present, noted)


def same(present: Any, noted: Any) -> bool:
    """Whether two simple values are equal, with equal types and order: 2 and 2.0, or 0.0 and -0.0, are different."""
    if type(present) is not type(noted):
        return False
    if type(noted) in _MAPPINGS:
        return list(present) == list(noted) and all(map(same, present.values(), noted.values()))
    if type(noted) in _SEQUENCES:
        return len(present) == len(noted) and all(map(same, present, noted))
    if isinstance(noted, Enum):
        return present is noted
    if isinstance(noted, (float, complex, np.generic)):
        return repr(present) == repr(noted)
    return bool(present == noted)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two host tensors of equal shape are bitwise equal (NaN equals itself)."""
    if one.dtype != other.dtype:
        return False
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
