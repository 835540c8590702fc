"""Reads pickled files of which only plain values are wanted, without running what else they name.

A pickle may name any function, which Python's own reader calls. A checkpoint may come from somebody else, so everything
in the packages that reads one goes through this file.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import pathlib
import pickle
import re
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, ClassVar

import numpy as np
import torch

from xla_adapters.errors import CheckpointUnsafeError
from xla_adapters.utils.patching import replaced

# What pickle raises on bytes that are no pickle, or that call an allowed class with arguments it does not take.
_OF_WRONG_BYTES = (
    *(pickle.UnpicklingError, EOFError, struct.error),
    *(LookupError, TypeError, ValueError, AttributeError, OverflowError),
)
# `torch.serialization.safe_globals` changes a list of the process.
_LOCK = threading.RLock()
_REMEDY = "if you trust its author, call torch.serialization.add_safe_globals([...]) with that class before"


def load_values(source: Any, name: object = None, *, weights_only: bool | None = True) -> Any:
    """What `torch.save` wrote; tensors are on the host.

    Args:
        source: a path or a stream.
        name: of the file, for messages; of `source` if it is None.
        weights_only: as for `torch.load`; False, which only a user may say, reads anything.

    Raises:
        CheckpointUnsafeError: it holds more than tensors and plain values; nothing of it was run.
    """
    with only_values(source if name is None else name):
        return torch.load(source, map_location="cpu", weights_only=weights_only)


@contextmanager
def only_values(name: object) -> Iterator[None]:
    """Inside the context `torch.load(weights_only=True)` also reads arrays of numpy, paths, dates and namespaces.

    Args:
        name: of the file or folder that is read, for messages.

    Raises:
        CheckpointUnsafeError: (at the exit) torch has refused a file.
    """
    with _LOCK:
        # Those that the user allowed stay allowed afterwards.
        allowed = torch.serialization.get_safe_globals()
        missing = [item for item in _harmless() if item not in allowed]
        with torch.serialization.safe_globals(missing), replaced(torch, "load", _checking(torch.load)):
            try:
                yield
            except CheckpointUnsafeError:
                raise
            except pickle.UnpicklingError as error:
                raise _refused(name, error) from error


def _checking(load: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.load`, that refuses arrays whose bytes numpy would take for addresses of objects."""

    @functools.wraps(load)
    def checked(f: Any, *args: Any, weights_only: bool | None = None, **kwargs: Any) -> Any:
        if weights_only is False:
            return load(f, *args, weights_only=False, **kwargs)
        try:
            value = load(f, *args, weights_only=weights_only, **kwargs)
        except _OF_WRONG_BYTES as error:
            raise pickle.UnpicklingError(str(error) or type(error).__name__) from error
        if any(map(_is_forged, _arrays_in(value))):
            raise pickle.UnpicklingError("it has an array that says that numbers are something else")
        return value

    return checked


def _arrays_in(value: Any) -> Iterator[np.ndarray[Any, Any]]:
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, Mapping):
        yield from _arrays_in([*value.keys(), *value.values()])
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _arrays_in(item)
    elif isinstance(value, argparse.Namespace):
        yield from _arrays_in(vars(value))


def _is_forged(array: np.ndarray[Any, Any]) -> bool:
    """Whether the array's dtype is not the one of its numbers: a pickle can give it any fields and flags."""
    dtype, known = array.dtype, np.dtype(array.dtype.type)
    return dtype.fields is not None or dtype.subdtype is not None or dtype.flags != known.flags


def unpickle(file: IO[bytes], allowed: Mapping[str, Any], name: object) -> Any:
    """What `pickle.dump` wrote.

    Args:
        file: the stream.
        allowed: what the file may name, by `module.name`.
        name: of the file, for messages.

    Raises:
        CheckpointUnsafeError: it names something else, or is no pickle; nothing of it was run.
    """
    try:
        return _Unpickler(file, allowed).load()
    except _OF_WRONG_BYTES as error:
        raise _refused(name, error) from error


class _Unpickler(pickle._Unpickler):
    """Python's reader, that finds only what is allowed.

    Python's own implementation, since that in C sets attributes of classes if a file asks for it.
    """

    dispatch: ClassVar[dict[int, Callable[..., None]]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, file: IO[bytes], allowed: Mapping[str, Any]) -> None:
        super().__init__(file)
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in self._allowed:
            raise pickle.UnpicklingError(f"GLOBAL {full} is not allowed")
        return self._allowed[full]

    def load_build(self) -> None:
        if isinstance(self.stack[-2], type):  # type: ignore[attr-defined]
            raise pickle.UnpicklingError("it sets attributes of a class")
        pickle._Unpickler.load_build(self)  # type: ignore[attr-defined]

    dispatch[pickle.BUILD[0]] = load_build


@functools.cache
def _harmless() -> tuple[Any, ...]:
    """Classes, and functions of numpy that make arrays; none does more with its arguments than to keep them."""
    array, number = (value.__reduce__()[0] for value in (np.zeros(0), np.float64(0)))
    # The module had another name before numpy 2.
    made = [
        (function, f"{module}.multiarray.{name}")
        for module in ("numpy._core", "numpy.core")
        for function, name in ((array, "_reconstruct"), (number, "scalar"))
    ]
    # Not those whose items have a size that a file says.
    dtypes = {type(np.dtype(code)) for code in "?bhilqBHILQefdgFDG"}
    # Their module has another name from Python 3.13 on.
    paths = [
        (kind, f"{module}.{kind.__name__}")
        for module in ("pathlib", "pathlib._local")
        for kind in (pathlib.PosixPath, pathlib.PurePosixPath)
    ]
    dates = (datetime.date, datetime.datetime, datetime.timedelta)
    # `bytes` are called for an empty one.
    values = (bytes, frozenset, range, slice, argparse.Namespace)
    return (*made, np.ndarray, np.dtype, *dtypes, *paths, *dates, *values)


def _refused(name: object, error: Exception) -> CheckpointUnsafeError:
    text = str(error)
    found = re.search(r"GLOBAL (\S+)", text)
    if found:
        what = f"names {found[1]}, which is no plain value, and would be run by reading it"
    else:
        # Torch's own reason stands behind a paragraph of advice.
        reason = text.rpartition("WeightsUnpickler error: ")[2].strip().partition("\n")[0]
        what = f"holds something else than tensors and plain values ({reason or type(error).__name__})"
    return CheckpointUnsafeError(f"{name} {what}. The file was refused, and nothing of it was run; {_REMEDY}")
