"""Reads and writes HLO shapes as encoded ShapeProto messages.

Source: ShapeProto and LayoutProto in `xla/xla_data.proto` (numbers of fields).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from xla_adapters.hlo import wire

# Field numbers of ShapeProto.
_ELEMENT_TYPE, _DIMENSIONS, _TUPLE_SHAPES, _LAYOUT, _IS_DYNAMIC, _TUPLE = 2, 3, 4, 5, 6, 13
# Field numbers of LayoutProto.
_MINOR_TO_MAJOR, _TAIL_PADDING = 1, 16
# Bytes per element, by PrimitiveType.
_BYTE_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 2, 8: 4, 9: 8, 10: 2, 11: 4, 12: 8, 15: 8, 16: 2, 18: 16}
# PrimitiveType numbers.
PRED, U32 = 1, 8


@functools.cache
def element_type(shape: bytes) -> int:
    """The PrimitiveType number of an array's elements."""
    return next((value for number, value, _ in wire.fields(shape) if number == _ELEMENT_TYPE), 0)  # type: ignore[return-value]


@functools.cache
def dimensions(shape: bytes) -> tuple[int, ...]:
    """The dimensions of an array."""
    return tuple(
        size for number, value, _ in wire.fields(shape) if number == _DIMENSIONS for size in wire.integers(value)
    )


@functools.cache
def count(shape: bytes) -> int:
    """The number of elements of an array."""
    return math.prod(dimensions(shape))


@functools.cache
def byte_size(shape: bytes) -> int:
    """Bytes of an array; 0 for a tuple."""
    return count(shape) * _BYTE_SIZES.get(element_type(shape), 0)


@functools.cache
def array_shape(kind: int, *sizes: int) -> bytes:
    """The shape of an array in row-major layout.

    Args:
        kind: PrimitiveType number of the elements.
        sizes: the dimensions; none for a scalar.
    """
    layout = wire.numbers(_MINOR_TO_MAJOR, range(len(sizes) - 1, -1, -1)) + wire.number(_TAIL_PADDING, 1)
    return b"".join(
        (
            wire.number(_ELEMENT_TYPE, kind),
            wire.numbers(_DIMENSIONS, sizes),
            wire.message(_LAYOUT, layout),
            wire.numbers(_IS_DYNAMIC, [0] * len(sizes)),
        )
    )


def tuple_shape(shapes: Sequence[bytes]) -> bytes:
    """The shape of a tuple with elements of these shapes."""
    return wire.number(_ELEMENT_TYPE, _TUPLE) + b"".join(wire.message(_TUPLE_SHAPES, shape) for shape in shapes)
