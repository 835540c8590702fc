"""`annotate`: writes shardings and donations into an encoded HLO module.

Source: `xla/service/hlo.proto` (HloBufferDonorProto) and `xla/xla_data.proto` (OpSharding), numbers of fields.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from xla_adapters.hlo import wire
from xla_adapters.hlo.fields import (
    COMPUTATION_ID,
    ID,
    INSTRUCTIONS,
    MODULE_COMPUTATIONS,
    MODULE_ENTRY,
    OPCODE,
    OPERANDS,
    PARAMETER_NUMBER,
    ROOT,
)

# Of HloModuleProto and HloInstructionProto.
_BUFFER_DONOR, _SHARDING = 18, 40
# Of HloBufferDonorProto and its entries.
_ENTRY, _DONATED_PARAMETER = 1, 1
# Of OpSharding, and its type OTHER (replicated is 0, which is not written).
_TYPE, _DIMENSIONS, _DEVICES, _REPLICATE_LAST, _OTHER = 1, 3, 4, 6, 3


def sharding(counts: Sequence[int], devices: Sequence[int]) -> bytes:
    """An OpSharding.

    Args:
        counts: tiles along each dimension of the tensor.
        devices: tile by tile in row-major order; as many per tile as there are copies of it.
    """
    number = math.prod(counts)
    if number == 1:
        return b""
    copies = len(devices) // number
    dimensions = [*counts, copies] if copies > 1 else counts
    return b"".join(
        (
            wire.number(_TYPE, _OTHER),
            wire.numbers(_DIMENSIONS, dimensions),
            wire.numbers(_DEVICES, devices),
            wire.number(_REPLICATE_LAST, 1) if copies > 1 else b"",
        )
    )


def annotate(
    module: bytes, parameters: Mapping[int, bytes], results: Mapping[int, bytes], donated: Collection[int]
) -> bytes:
    """The module with annotations; those that are there already are replaced.

    Args:
        module: an HloModuleProto, whose result is a tuple.
        parameters: shardings, as `sharding` writes them, by number of the parameter.
        results: shardings by position in the result.
        donated: numbers of the parameters whose memory results may take.
    """
    parts = list(wire.fields(module))
    entry = next(value for number, value, _ in parts if number == MODULE_ENTRY)
    written = []
    for number, value, encoded in parts:
        if number == MODULE_COMPUTATIONS and isinstance(value, bytes) and _field(value, COMPUTATION_ID) == entry:
            encoded = wire.message(MODULE_COMPUTATIONS, _annotated(value, parameters, results))
        written.append(encoded)
    # The index of the donated part of a parameter is empty: all of it.
    donors = b"".join(wire.message(_ENTRY, wire.number(_DONATED_PARAMETER, number)) for number in sorted(donated))
    return b"".join(written) + (wire.message(_BUFFER_DONOR, donors) if donors else b"")


def _field(message: bytes, wanted: int) -> int | bytes:
    return next((value for number, value, _ in wire.fields(message) if number == wanted), 0)


def _annotated(computation: bytes, parameters: Mapping[int, bytes], results: Mapping[int, bytes]) -> bytes:
    parts = list(wire.fields(computation))
    instructions = [value for number, value, _ in parts if number == INSTRUCTIONS and isinstance(value, bytes)]
    root_id = next(value for number, value, _ in parts if number == ROOT)
    root = next(item for item in instructions if _field(item, ID) == root_id)
    operands = [item for number, value, _ in wire.fields(root) if number == OPERANDS for item in wire.integers(value)]
    by_id: dict[int | bytes, bytes] = {operands[position]: added for position, added in results.items()}
    written = []
    for number, value, encoded in parts:
        if number == INSTRUCTIONS and isinstance(value, bytes):
            fields = {field: item for field, item, _ in wire.fields(value) if field in (ID, OPCODE, PARAMETER_NUMBER)}
            if fields[OPCODE] == b"parameter":
                place = fields.get(PARAMETER_NUMBER, 0)
                added = parameters.get(place) if isinstance(place, int) else None
            else:
                added = by_id.get(fields[ID])
            if added is not None:
                kept = [item for field, _, item in wire.fields(value) if field != _SHARDING]
                encoded = wire.message(INSTRUCTIONS, b"".join(kept) + wire.message(_SHARDING, added))
        written.append(encoded)
    return b"".join(written)
