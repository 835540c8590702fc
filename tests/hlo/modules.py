"""Reads encoded HLO modules, for tests."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from xla_adapters.hlo import protobuf
from xla_adapters.hlo.protobuf import (
    COMPUTATION_ID,
    ID,
    INSTRUCTIONS,
    MODULE_COMPUTATIONS,
    MODULE_ENTRY,
    OPCODE,
    OPERANDS,
    PARAMETER_NUMBER,
    SHAPE,
    dimensions,
    element_type,
)

SHARDING, BUFFER_DONOR = 40, 18


def fields(message: bytes) -> dict[int, int | bytes]:
    return {number: value for number, value, _ in protobuf.fields(message)}


def entry(module: bytes) -> Iterator[dict[int, int | bytes]]:
    """The fields of each instruction of the entry computation."""
    wanted = fields(module)[MODULE_ENTRY]
    for number, value, _ in protobuf.fields(module):
        if number == MODULE_COMPUTATIONS and isinstance(value, bytes) and fields(value)[COMPUTATION_ID] == wanted:
            for inner, item, _ in protobuf.fields(value):
                if inner == INSTRUCTIONS and isinstance(item, bytes):
                    yield fields(item)


def operations(module: bytes) -> collections.Counter[tuple[object, ...]]:
    """How often the entry computation has an opcode with this type and these dimensions.

    Without annotations, and without transposes: a view of a parameter may be made again where it is read again.
    """
    found = (described(item)[:3] for item in entry(module))
    return collections.Counter(item for item in found if item[0] not in ("custom-call", "transpose"))


def parameters(module: bytes) -> collections.Counter[tuple[object, ...]]:
    """Type, dimensions and sharding of each parameter."""
    return collections.Counter(described(item) for item in entry(module) if item[OPCODE] == b"parameter")


def results(module: bytes) -> collections.Counter[tuple[object, ...]]:
    """Type, dimensions and sharding of each result, as its last operation or an annotation after that states it."""
    items = {item[ID]: item for item in entry(module)}
    root = list(items.values())[-1]
    operands = root[OPERANDS]
    return collections.Counter(described(items[place])[1:] for place in protobuf.integers(operands))


def described(item: dict[int, int | bytes]) -> tuple[object, ...]:
    """Opcode, type, dimensions and sharding of an instruction."""
    opcode, shape, sharding = item[OPCODE], item.get(SHAPE, b""), item.get(SHARDING)
    assert isinstance(opcode, bytes)
    assert isinstance(shape, bytes)
    assert sharding is None or isinstance(sharding, bytes)
    return opcode.decode(), element_type(shape), dimensions(shape), read_sharding(sharding)


def read_sharding(message: bytes | None) -> tuple[object, ...] | None:
    """Kind, tiles and devices of an OpSharding; None if there is none."""
    if message is None:
        return None
    lists: dict[int, list[int]] = {}
    for number, value, _ in protobuf.fields(message):
        lists.setdefault(number, []).extend(protobuf.integers(value))
    return tuple(tuple(lists.get(number, [0] if number in (1, 6) else [])) for number in (1, 3, 4, 6))


def shardings_of_parameters(module: bytes) -> dict[int, bytes]:
    """By number of the parameter; those that have none are left out."""
    return {
        int(item.get(PARAMETER_NUMBER, 0)): bytes(item[SHARDING])  # type: ignore[arg-type]
        for item in entry(module)
        if item[OPCODE] == b"parameter" and SHARDING in item
    }


def donated(module: bytes) -> set[int]:
    """Numbers of the parameters that are donated."""
    config = fields(module).get(BUFFER_DONOR, b"")
    assert isinstance(config, bytes)
    return {int(fields(value).get(1, 0)) for _, value, _ in protobuf.fields(config) if isinstance(value, bytes)}
