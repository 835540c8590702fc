"""`ContainerEntries`: remembers entries of a dictionary or items of a sequence, to compare them later."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import call, eq, is_, itemgetter
from typing import Any

from xla_adapters.utils.nested_values import ABSENT, differs, is_simple

_GROUPS = {"_parameters": "the parameter", "_buffers": "the buffer", "_modules": "the submodule"}


class Slots(Mapping[str, Any]):
    """What an object holds in `__slots__`, as a mapping; `ABSENT` for those that are not set."""

    def __init__(self, owner: object) -> None:
        self._owner = owner
        self._members = {
            name: member
            for cls in reversed(type(owner).__mro__)
            for name, member in vars(cls).items()
            if isinstance(member, types.MemberDescriptorType)
        }

    def __getitem__(self, name: str) -> Any:
        try:
            return self._members[name].__get__(self._owner)
        except AttributeError:
            return ABSENT

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)


class ContainerEntries:
    """Remembers some entries of a dictionary, or all items of a sequence.

    Args:
        owner: the dictionary or sequence.
        path: its name for messages.
        names: the keys of the entries; None for a sequence.
        size: the number of all entries; None if others may be added or removed.
        ordered: whether the order of all entries counts, as it does for code that loops over them.
    """

    __slots__ = ("_fetch", "_names", "_noted", "_order", "_owner", "_path", "_size")

    def __init__(
        self, owner: Any, path: str, names: tuple[Any, ...] | None, size: int | None, *, ordered: bool = False
    ) -> None:
        self._owner = owner
        self._path = path
        self._names = names
        self._size = size
        self._fetch: Callable[[Any], tuple[Any, ...]] = tuple
        if names is not None:
            # Twice the first name: with a single name, `itemgetter` returns no tuple.
            self._fetch = itemgetter(*names, names[0]) if names else _nothing
        self._noted = self._fetch(owner)
        self._order = list(owner) if ordered and len(owner) > 1 else None

    @classmethod
    def all_of(cls, owner: Mapping[Any, Any], path: str) -> ContainerEntries:
        """All entries of a dictionary, in their order."""
        return cls(owner, path, tuple(owner), len(owner), ordered=True)

    def difference(self) -> str | None:
        """Which entry has another value, in words, or None. Equal values of other objects are no difference."""
        if self._size is not None and len(self._owner) != self._size:
            names = self._owner if isinstance(self._owner, Mapping) else ()
            more = next((name for name in names if name not in (self._names or ())), None)
            if more is None:
                return f"{self._path} holds more or less than before"
            # Hooks have numbers, which say nothing.
            return f"{self._path} has got {repr(more) if isinstance(more, str) else said(self._owner[more])}"
        if self._names is None:
            changed = any(map(differs, self._owner, self._noted))
            return f"{self._path} holds something else" if changed else None
        for name, noted in zip(self._names, self._noted, strict=False):
            present = self._owner.get(name, ABSENT)
            if differs(present, noted):
                return _changed(self._path, name, noted, present)
        if self._order is not None and list(self._owner) != self._order:
            return f"{self._path} has its entries in another order"
        return None


class EntriesCheck:
    """Whether all parts are unchanged. Loops in C: a call of Python for each of some hundred parts costs much more.

    Args:
        parts: to compare.
    """

    def __init__(self, parts: Iterable[ContainerEntries]) -> None:
        parts = list(parts)
        # Functions are equal only to themselves, and tuples compare faster. Of a part without entries the size counts.
        functions = [part for part in parts if part._noted and all(map(_is_function, part._noted))]
        self._namespaces = [part._owner for part in functions]
        self._fetch_functions = [part._fetch for part in functions]
        self._functions = [part._noted for part in functions]
        fetched = [part for part in parts if part._noted and not all(map(_is_function, part._noted))]
        self._owners = [part._owner for part in fetched]
        self._fetch = [part._fetch for part in fetched]
        self._noted = [item for part in fetched for item in part._noted]
        sized = [part for part in parts if part._size is not None]
        self._sized = [part._owner for part in sized]
        self._sizes = [part._size for part in sized]
        ordered = [part for part in parts if part._order is not None]
        self._ordered = [part._owner for part in ordered]
        self._orders = [part._order for part in ordered]

    def holds(self) -> bool:
        """Whether the entries of all parts are the same objects as before.

        Raises:
            KeyError: one of the names was removed.
        """
        # The sizes first: a sequence of another size would shift what follows it.
        return (
            list(map(len, self._sized)) == self._sizes
            and all(map(eq, self._functions, map(call, self._fetch_functions, self._namespaces)))
            and all(map(is_, chain.from_iterable(map(call, self._fetch, self._owners)), self._noted))
            and all(map(eq, map(list, self._ordered), self._orders))
        )


def _is_function(item: Any) -> bool:
    return isinstance(item, (types.FunctionType, types.BuiltinFunctionType))


def _nothing(owner: Any) -> tuple[Any, ...]:
    return ()


def _changed(path: str, name: Any, noted: Any, present: Any) -> str:
    owner, _, group = path.rpartition(".")
    if group in _GROUPS:
        return f"{_GROUPS[group]} {name} of {owner} was replaced"
    if name == "training":
        return f"{path} went to {'eval' if noted else 'train'} mode"
    return f"{path}.{name}: {difference(noted, present)}"


def difference(noted: Any, present: Any) -> str:
    """Two objects for a message, by their addresses too if their texts are the same."""
    before, now = said(noted), said(present)
    if before == now:
        before, now = f"{before} at {id(noted):#x}", f"another at {id(present):#x}"
    return f"{before} -> {now}"


def said(value: Any) -> str:
    """The text of a value for a message."""
    if value is ABSENT:
        return "nothing"
    if is_simple(value):
        return f"{value!r:.60}"
    # The repr of a tensor reads from the device; that of other objects may run user code.
    value = value.__func__ if isinstance(value, types.MethodType) else value
    if isinstance(value, types.FunctionType):
        code = value.__code__
        return f"{value.__qualname__} ({code.co_filename}:{code.co_firstlineno})"
    if isinstance(value, (type, types.BuiltinFunctionType)):
        return f"{value.__module__}.{value.__qualname__}"
    return f"a {type(value).__name__}"
