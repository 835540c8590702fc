"""Finds and replaces tensors in nested mappings, lists and tuples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

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
    """The value with each mapping as a plain dict (torch's pytrees treat `BatchEncoding` and the like as leaves)."""
    if isinstance(value, Mapping):
        return {key: as_dicts(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(as_dicts(item) for item in value)
    return value
