"""`newly_equal`: Python numbers that have become equal, and so share one input of the graph."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

from xla_adapters.tracing.difference import Difference, line_of, name_of
from xla_adapters.tracing.list_updates import LISTED
from xla_adapters.tracing.operation_log import Call, Update

# Python numbers with these values are constants of the graph; others are inputs where operators compute with them.
SPECIAL = (0, 1)
# Of single precision.
_LARGEST = 3.4e38
ARITHMETIC = frozenset(
    ("add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "div", "truediv", "rtruediv", "itruediv")
)
# Where operators take a tensor in place of a number.
TAKES_TENSORS = ARITHMETIC | {"pow", "rpow", "ipow", "getitem", "where", "lerp", "fill", "clamp", "remainder"}
TAKES_TENSORS |= {"eq", "ne", "lt", "le", "gt", "ge"}
# "indexing" is how `getitem` is shown.
MAY_BE_INPUTS = TAKES_TENSORS - {"getitem"}
# What makes tensors of numbers: their values are inputs.
UPLOADS = frozenset(("tensor", "as_tensor", "scalar_tensor", "new_tensor", "asarray"))


def newly_equal(pairs: Sequence[tuple[Any, Any]]) -> Difference | None:
    """Two numbers that are equal in one of the calls only: equal numbers share one input of the graph.

    They are compared as the device has them. 1 - n is compared, too: operators compute it of a momentum or a decay.
    """
    numbers = [pair for theirs, mine in pairs for pair in _numbers_of(theirs, mine)]
    first_old: dict[float, int] = {}
    first_new: dict[float, int] = {}
    for index, (old, new, shown, entry) in enumerate(numbers):
        was, equal = first_old.setdefault(old, index), first_new.setdefault(new, index)
        if was == equal or (old in SPECIAL) or (new in SPECIAL):
            continue
        _, _, other, there = numbers[equal if equal < index else was]
        text = f"{shown} in {name_of(entry)} and {other} in {name_of(there)} ({line_of(there)})"
        now = "equal now" if equal < index else "not equal any more"
        return Difference(
            cause=f"{text} are {now}: equal Python numbers share one input of the graph",
            where=line_of(entry),
            remedy="nothing, if it happens once; numbers that often meet can be kept apart by making one of "
            "them a tensor (torch.tensor(value, device=x.device))",
            is_harmless=True,
        )
    return None


def _numbers_of(theirs: Any, mine: Any) -> Iterator[tuple[float, float, str, Call | Update]]:
    """The numbers of an entry that may be inputs of the graph: the old one and the new one in single precision."""
    if not isinstance(mine, (Call, Update)) or (isinstance(mine, Update) and mine.kind in LISTED):
        return
    kinds = (int, float) if isinstance(mine, Call) and name_of(mine) in MAY_BE_INPUTS else (float,)
    for old, new in zip(_scalars(theirs.numbers, kinds), _scalars(mine.numbers, kinds), strict=False):
        yield _single(old), _single(new), f"{new!r}", mine
        if old == new or isinstance(mine, Update):
            yield _single(1 - old), _single(1 - new), f"1 - {new!r}", mine


def _scalars(value: Any, kinds: tuple[type, ...]) -> Iterator[float]:
    if isinstance(value, tuple):
        for item in value:
            yield from _scalars(item, kinds)
    elif type(value) in kinds:
        yield value


def _single(number: float) -> float:
    single: float = struct.unpack("f", struct.pack("f", number))[0] if abs(number) < _LARGEST else number
    return single
