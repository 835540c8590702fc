"""`batch_obstacle`: whether a batch is described completely by its structure, shapes and plain values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from xla_adapters.replay.safety.trusted import is_trusted
from xla_adapters.utils.nested_values import is_simple, own_attributes


def batch_obstacle(value: Any) -> str | None:
    """Why steps with such a batch are traced, in words; None if they can be replayed.

    A batch may consist of tensors, constants, Python's own containers, named tuples without methods, and the batch
    classes of trusted packages. These may have attributes that can be compared: they are part of the call's key.
    """
    if isinstance(value, torch.Tensor):
        if type(value) is not torch.Tensor:
            return f"the batch holds a {type(value).__name__}"
        attribute = next(iter(vars(value)), None)
        return None if attribute is None else f"a tensor of the batch has a Python attribute, {attribute!r}"
    kind = type(value)
    if kind in (list, tuple) or _is_plain_named_tuple(kind):
        return _first(value)
    if kind in (dict, OrderedDict) or (isinstance(value, Mapping) and is_trusted(kind)):
        own = next((name for name, item in own_attributes(value).items() if not is_simple(item)), None)
        if own is not None:
            return f"the batch has a Python attribute, {own!r}, which cannot be compared"
        keys = next((key for key in value if type(key) not in (str, int)), None)
        return _first(value.values()) if keys is None else f"the batch has a key that is a {type(keys).__name__}"
    if is_simple(value):
        return None
    return f"the batch holds a {kind.__name__}, which cannot be compared with that of another step"


def _first(values: Iterable[Any]) -> str | None:
    return next((obstacle for value in values if (obstacle := batch_obstacle(value)) is not None), None)


def _is_plain_named_tuple(kind: type) -> bool:
    """Whether a class is a named tuple without methods or bases of its own."""
    fields = getattr(kind, "_fields", None)
    if kind.__mro__ != (kind, tuple, object) or fields is None:
        return False
    own = {name for name in vars(kind) if not name.startswith("_")}
    special = (
        vars(kind).get(name) for name in ("__getattr__", "__getattribute__", "__getitem__", "__iter__", "__eq__")
    )
    return own == set(fields) and not any(special)
