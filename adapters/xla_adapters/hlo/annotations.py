"""`annotate` writes shardings and donations into an encoded HLO module, `with_donors` donations into StableHLO text.

Source: `xla/service/hlo.proto` (HloBufferDonorProto) and `xla/xla_data.proto` (OpSharding), numbers of fields. The
argument attribute `jax.buffer_donor` is read by `xla/hlo/translate/mhlo_to_hlo/mlir_hlo_to_hlo.cc`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence

from xla_adapters.hlo import wire
from xla_adapters.hlo.wire import (
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
_TYPE, _TILE_DIMENSIONS, _DEVICES, _REPLICATE_LAST, _OTHER = 1, 3, 4, 6, 3


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
            wire.numbers(_TILE_DIMENSIONS, dimensions),
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
        if number == MODULE_COMPUTATIONS and wire.first(wire.by_number(value), COMPUTATION_ID) == entry:
            encoded = wire.message(MODULE_COMPUTATIONS, _annotated(value, parameters, results))
        written.append(encoded)
    # The index of the donated part of a parameter is empty: all of it.
    donors = b"".join(wire.message(_ENTRY, wire.number(_DONATED_PARAMETER, number)) for number in sorted(donated))
    return b"".join(written) + (wire.message(_BUFFER_DONOR, donors) if donors else b"")


def _annotated(computation: bytes, parameters: Mapping[int, bytes], results: Mapping[int, bytes]) -> bytes:
    parts = wire.by_number(computation)
    instructions = {wire.first(found, ID): found for found in map(wire.by_number, parts[INSTRUCTIONS])}
    operands = wire.packed(instructions[wire.first(parts, ROOT)], OPERANDS)
    by_id = {operands[position]: added for position, added in results.items()}
    for identity, found in instructions.items():
        if wire.first(found, OPCODE) == b"parameter":
            by_id.pop(identity, None)
            place = wire.first(found, PARAMETER_NUMBER)
            if place in parameters:
                by_id[identity] = parameters[place]
    written = []
    for number, value, encoded in wire.fields(computation):
        added = by_id.get(wire.first(wire.by_number(value), ID)) if number == INSTRUCTIONS else None
        if added is not None:
            kept = [item for field, _, item in wire.fields(value) if field != _SHARDING]
            encoded = wire.message(INSTRUCTIONS, b"".join(kept) + wire.message(_SHARDING, added))
        written.append(encoded)
    return b"".join(written)


_DONOR = "jax.buffer_donor = true"


def with_donors(module: bytes, donated: Collection[int]) -> bytes:
    """The program, whose results may take the memory of some arguments.

    Args:
        module: text of an MLIR module whose function is `main`.
        donated: positions of arguments.
    """
    before, main, signature = module.decode().partition("func.func @main(")
    arguments, arrow, after = signature.partition(") -> ")
    assert main
    assert arrow
    for number in donated:
        arguments, found = re.subn(rf"(%arg{number}: tensor<[^>]*>)", rf"\1 {{{_DONOR}}}", arguments, count=1)
        assert found == 1, number
    return f"{before}{main}{arguments}{arrow}{after}".encode()
