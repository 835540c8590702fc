"""Helpers that do not depend on XLA or on training steps. What is here itself imports no torch."""

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def load_late(package: str, homes: Mapping[str, str], name: str) -> Any:
    """For `__getattr__` of a package whose names need torch: imports one when it is used.

    Args:
        package: its name.
        homes: the module of the package that has each name.
        name: the one that is used.

    Raises:
        AttributeError: it is not among them.
    """
    if name not in homes:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    value = getattr(import_module(f"{package}.{homes[name]}"), name)
    setattr(sys.modules[package], name, value)
    return value


def in_bytes(size: float) -> str:
    """A size in words: 1.5 MiB."""
    unit = next(((unit, name) for unit, name in _UNITS if size >= unit), None)
    return f"{size:.0f} B" if unit is None else f"{size / unit[0]:.1f} {unit[1]}"
