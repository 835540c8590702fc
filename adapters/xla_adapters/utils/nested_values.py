"""Values in mappings, lists and tuples: finds and replaces tensors, copies constants and compares them."""

from __future__ import annotations

import copy
import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from enum import Enum
from typing import Any

import numpy as np
import torch

Identity = tuple[object, ...]
# Checked first: states of random generators are tuples of hundreds of ints.
_ATOMS = frozenset({int, float, str, bool, type(None)})


def identity(tensor: torch.Tensor) -> Identity:
    """A key that is equal for tensors with the same memory, shape, strides and dtype (tied weights)."""
    try:
        storage: object = tensor.untyped_storage()._cdata
    except NotImplementedError:
        storage = id(tensor)
    return (storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a value, in order, with repetitions."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors_among(value.values())
    elif isinstance(value, (list, tuple)):
        yield from _tensors_among(value)


def _tensors_among(items: Iterable[Any]) -> Iterator[torch.Tensor]:
    for item in items:
        if type(item) not in _ATOMS:
            yield from tensors_in(item)


def replaced(value: Any, tensor: Callable[[torch.Tensor], Any], other: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """Copies a nested value with its leaves replaced. Mutable mappings keep their type and attributes.

    Args:
        value: the nested value.
        tensor: called with each tensor; returns its replacement.
        other: called with each other leaf; returns its replacement.
    """
    if type(value) in _ATOMS:
        return other(value)
    if isinstance(value, torch.Tensor):
        return tensor(value)
    if isinstance(value, MutableMapping):
        # `copy.copy` keeps attributes: a state dict has the versions of its modules in `_metadata`.
        result = copy.copy(value)
        for key, item in value.items():
            result[key] = replaced(item, tensor, other)
        return result
    if isinstance(value, Mapping):
        return {key: replaced(item, tensor, other) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(replaced(item, tensor, other) for item in value))
    if isinstance(value, (list, tuple)):
        items = [replaced(item, tensor, other) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return other(value)


def as_dicts(value: Any) -> Any:
    """The value with each mapping as a plain dict (torch's pytrees treat `BatchEncoding` and the like as leaves).

    With the simple attributes of a mapping, it becomes a pair of dicts.
    """
    if isinstance(value, Mapping):
        entries = {key: as_dicts(item) for key, item in value.items()}
        own = {name: item for name, item in own_attributes(value).items() if is_simple(item)}
        return (entries, own) if own else entries
    if type(value) in (list, tuple):
        return type(value)(as_dicts(item) for item in value)
    return value


def own_attributes(value: Mapping[Any, Any]) -> dict[str, Any]:
    """The public attributes of a mapping, without that in which `UserDict` keeps the entries, and without entries.

    A `ModelOutput` of transformers has its entries as attributes, too.
    """
    attributes = getattr(value, "__dict__", {})
    return {
        name: item
        for name, item in attributes.items()
        if name != "data" and name[0] != "_" and not (name in value and value[name] is item)
    }


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
