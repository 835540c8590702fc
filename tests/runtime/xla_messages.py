"""The messages that XLA's programs and options are made of, as torch_xla's library describes them."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import _XLAC
from google.protobuf import descriptor_pb2

from xla_adapters.hlo import protobuf

Messages = dict[str, descriptor_pb2.DescriptorProto]
# Numbers of the fields on the way to a map, the map's own last.
MapPath = tuple[int, ...]

_MESSAGE = 11
_LONGEST = 1 << 20
_BEGIN = re.compile(rb"\n[\x08-\x60]((?:xla|google|tsl)/[a-z_/0-9]+\.proto)")


def _end(data: bytes, begin: int) -> int:
    """Where a description ends: its fields have numbers up to 14, in ascending order but for two."""
    last, at = 0, begin
    try:
        for number, _, encoded in protobuf.fields(data[begin : begin + _LONGEST]):
            if not last <= number <= 14 or not number or encoded[0] & 7 not in (0, 2):
                break
            last = last if number in (10, 11) else number
            at += len(encoded)
    except ValueError:
        # What follows is no message.
        pass
    return at


def described() -> Messages:
    """All messages of XLA by name."""
    data = Path(_XLAC.__file__).read_bytes()
    found: Messages = {}

    def add(prefix: str, message: descriptor_pb2.DescriptorProto) -> None:
        name = f"{prefix}.{message.name}" if prefix else message.name
        found[name] = message
        for nested in message.nested_type:
            add(name, nested)

    for match in _BEGIN.finditer(data):
        if data[match.start() + 1] == len(match[1]):
            file = descriptor_pb2.FileDescriptorProto.FromString(data[match.start() : _end(data, match.start())])
            for message in file.message_type:
                add(file.package, message)
    return found


def map_paths(messages: Messages, name: str) -> Iterator[MapPath]:
    """The maps that a message may have, at any depth."""
    return _paths(messages, name, (), (name,))


def _paths(messages: Messages, name: str, path: MapPath, around: tuple[str, ...]) -> Iterator[MapPath]:
    for field in messages[name].field:
        if field.type != _MESSAGE:
            continue
        inner = field.type_name.removeprefix(".")
        if messages[inner].options.map_entry:
            yield (*path, field.number)
        if inner not in around:
            yield from _paths(messages, inner, (*path, field.number), (*around, inner))


def filled(messages: Messages, name: str, order: int) -> bytes:
    """A message in which each map has five entries, in an order that depends on a number."""
    draw = random.Random(order)
    parts = []
    for path in map_paths(messages, name):
        entries = [
            protobuf.message(path[-1], protobuf.message(1, b"key %d" % number) + protobuf.message(2, b"x" * number))
            for number in range(5)
        ]
        draw.shuffle(entries)
        content = b"".join(entries)
        for number in reversed(path[:-1]):
            content = protobuf.message(number, content)
        parts.append(content)
    return b"".join(parts)
