"""`annotate` writes shardings and donations into an encoded HLO module, `with_donors` donations into StableHLO text.

Source: `xla/service/hlo.proto` (HloBufferDonorProto) and `xla/xla_data.proto` (OpSharding), numbers of fields. The
argument attribute `jax.buffer_donor` is read by `xla/hlo/translate/mhlo_to_hlo/mlir_hlo_to_hlo.cc`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence

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
            protobuf.number(_TYPE, _OTHER),
            protobuf.numbers(_TILE_DIMENSIONS, dimensions),
            protobuf.numbers(_DEVICES, devices),
            protobuf.number(_REPLICATE_LAST, 1) if copies > 1 else b"",
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
    parts = list(protobuf.fields(module))
    entry = next(value for number, value, _ in parts if number == MODULE_ENTRY)
    written = []
    for number, value, encoded in parts:
        if number == MODULE_COMPUTATIONS and protobuf.first(protobuf.by_number(value), COMPUTATION_ID) == entry:
            encoded = protobuf.message(MODULE_COMPUTATIONS, _annotated(value, parameters, results))
        written.append(encoded)
    # The index of the donated part of a parameter is empty: all of it.
    donors = b"".join(
        protobuf.message(_ENTRY, protobuf.number(_DONATED_PARAMETER, number)) for number in sorted(donated)
    )
    return b"".join(written) + (protobuf.message(_BUFFER_DONOR, donors) if donors else b"")


def _annotated(computation: bytes, parameters: Mapping[int, bytes], results: Mapping[int, bytes]) -> bytes:
    parts = protobuf.by_number(computation)
    instructions = {protobuf.first(found, ID): found for found in map(protobuf.by_number, parts[INSTRUCTIONS])}
    operands = protobuf.packed(instructions[protobuf.first(parts, ROOT)], OPERANDS)
    by_id = {operands[position]: added for position, added in results.items()}
    for identity, found in instructions.items():
        if protobuf.first(found, OPCODE) == b"parameter":
            by_id.pop(identity, None)
            place = protobuf.first(found, PARAMETER_NUMBER)
            if place in parameters:
                by_id[identity] = parameters[place]
    written = []
    for number, value, encoded in protobuf.fields(computation):
        added = by_id.get(protobuf.first(protobuf.by_number(value), ID)) if number == INSTRUCTIONS else None
        if added is not None:
            kept = [item for field, _, item in protobuf.fields(value) if field != _SHARDING]
            encoded = protobuf.message(INSTRUCTIONS, b"".join(kept) + protobuf.message(_SHARDING, added))
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
