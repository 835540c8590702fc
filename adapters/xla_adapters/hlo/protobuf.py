"""Reads and writes protobuf messages field by field, without a schema: those of HLO modules, and their shapes.

Unknown fields can be copied as they are. The format: https://protobuf.dev/programming-guides/encoding/. Source of
the numbers of fields: `xla/service/hlo.proto`, and ShapeProto and LayoutProto in `xla/xla_data.proto`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

_VARINT, _BYTES = 0, 2
_FIXED = {1: 8, 5: 4}


def fields(message: bytes) -> Iterator[tuple[int, Any, bytes]]:
    """The fields of a message: number, value (an int for a varint, else bytes), and the encoded field with its tag.

    Raises:
        ValueError: it is not a protobuf message.
    """
    at, end = 0, len(message)
    while at < end:
        start = at
        tag, at = _varint(message, at)
        kind = tag & 7
        value: int | bytes
        if kind == _VARINT:
            value, at = _varint(message, at)
        elif kind == _BYTES:
            size, at = _varint(message, at)
            value = message[at : at + size]
            at += size
        elif kind in _FIXED:
            value = message[at : at + _FIXED[kind]]
            at += _FIXED[kind]
        else:
            raise ValueError(f"a field of wire type {kind} at byte {start} of {end}")
        if at > end:
            raise ValueError(f"a field at byte {start} extends past the end, {end}")
        yield tag >> 3, value, message[start:at]


def by_number(message: bytes) -> dict[int, list[Any]]:
    """The values of a message's fields by number: ints of varints, and bytes of everything else.

    Raises:
        ValueError: it is not a protobuf message.
    """
    found: dict[int, list[Any]] = {}
    for number, value, _ in fields(message):
        found.setdefault(number, []).append(value)
    return found


def first(parts: Mapping[int, Sequence[Any]], field: int, default: Any = 0) -> Any:
    """The value of a field that occurs once, of a message as `by_number` reads it; what is 0 is not written."""
    return parts[field][0] if field in parts else default


def packed(parts: Mapping[int, Sequence[Any]], field: int) -> list[int]:
    """The values of a repeated integer field, of a message as `by_number` reads it."""
    return [item for value in parts.get(field, ()) for item in integers(value)]


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def integers(value: int | bytes) -> list[int]:
    """The values of a repeated integer field: packed (bytes), or a single varint."""
    if isinstance(value, int):
        return [value]
    found, at = [], 0
    while at < len(value):
        number, at = _varint(value, at)
        found.append(number)
    return found


def varint(value: int) -> bytes:
    """Encodes an integer, which must not be negative."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def number(field: int, value: int) -> bytes:
    """Encodes a field with an integer."""
    return varint(field << 3 | _VARINT) + varint(value)


def message(field: int, value: bytes) -> bytes:
    """Encodes a field with bytes or an encoded message."""
    return varint(field << 3 | _BYTES) + varint(len(value)) + value


def numbers(field: int, values: Iterable[int]) -> bytes:
    """Encodes a packed field of integers; empty if there are none."""
    packed = b"".join(map(varint, values))
    return message(field, packed) if packed else b""


# Field numbers of HloModuleProto.
MODULE_NAME, MODULE_ENTRY_NAME, MODULE_COMPUTATIONS, MODULE_PROGRAM_SHAPE, MODULE_ENTRY = 1, 2, 3, 4, 6
# Field numbers of HloComputationProto.
COMPUTATION_NAME, INSTRUCTIONS, PROGRAM_SHAPE, COMPUTATION_ID, ROOT = 1, 2, 4, 5, 6
# Field numbers of HloInstructionProto.
NAME, OPCODE, SHAPE, LITERAL, PARAMETER_NUMBER, DIMENSIONS = 1, 2, 3, 8, 9, 14
ID, OPERANDS, CALLED, COMPARISON_DIRECTION, FRONTEND_ATTRIBUTES = 35, 36, 38, 63, 68
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
    return int(first(by_number(shape), _ELEMENT_TYPE))


@functools.cache
def dimensions(shape: bytes) -> tuple[int, ...]:
    """The dimensions of an array."""
    return tuple(size for number, value, _ in fields(shape) if number == _DIMENSIONS for size in integers(value))


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
    layout = numbers(_MINOR_TO_MAJOR, range(len(sizes) - 1, -1, -1)) + number(_TAIL_PADDING, 1)
    return b"".join(
        (
            number(_ELEMENT_TYPE, kind),
            numbers(_DIMENSIONS, sizes),
            message(_LAYOUT, layout),
            numbers(_IS_DYNAMIC, [0] * len(sizes)),
        )
    )


def tuple_shape(shapes: Sequence[bytes]) -> bytes:
    """The shape of a tuple with elements of these shapes."""
    return number(_ELEMENT_TYPE, _TUPLE) + b"".join(message(_TUPLE_SHAPES, shape) for shape in shapes)
