"""Reads and writes protobuf messages field by field, without a schema; unknown fields can be copied as they are.

The format: https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

_VARINT, _BYTES = 0, 2
_FIXED = {1: 8, 5: 4}


def fields(message: bytes) -> Iterator[tuple[int, int | bytes, bytes]]:
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
