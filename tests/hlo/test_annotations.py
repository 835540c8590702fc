"""Shardings and donations in encoded HLO modules."""

from __future__ import annotations

from tests.hlo.modules import donated, read_sharding, shardings_of_parameters
from xla_adapters.hlo import protobuf
from xla_adapters.hlo.annotations import annotate, sharding
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

HALVES, WHOLE = sharding((2, 1), (0, 1)), sharding((1, 1), (0, 1))


def instruction(place: int, opcode: bytes, *fields: bytes) -> bytes:
    return protobuf.message(
        INSTRUCTIONS, protobuf.message(OPCODE, opcode) + protobuf.number(ID, place) + b"".join(fields)
    )


def module() -> bytes:
    """`(negate(p0), p1)`."""
    entry = b"".join(
        (
            instruction(10, b"parameter", protobuf.number(PARAMETER_NUMBER, 0)),
            instruction(11, b"parameter", protobuf.number(PARAMETER_NUMBER, 1)),
            instruction(12, b"negate", protobuf.numbers(OPERANDS, [10])),
            instruction(13, b"tuple", protobuf.numbers(OPERANDS, [12, 11])),
            protobuf.number(COMPUTATION_ID, 7),
            protobuf.number(ROOT, 13),
        )
    )
    # Instructions of other computations have the same numbers.
    other = instruction(12, b"negate", protobuf.numbers(OPERANDS, [10])) + protobuf.number(COMPUTATION_ID, 6)
    return b"".join(
        (
            protobuf.message(MODULE_COMPUTATIONS, other),
            protobuf.message(MODULE_COMPUTATIONS, entry),
            protobuf.number(MODULE_ENTRY, 7),
        )
    )


def test_shardings_are_written_as_xla_reads_them() -> None:
    assert read_sharding(HALVES) == ((3,), (2, 1), (0, 1), (0,))
    # Each half is on two devices: a last dimension that is replicated.
    assert read_sharding(sharding((2, 1), (0, 2, 1, 3))) == ((3,), (2, 1, 2), (0, 2, 1, 3), (1,))
    assert read_sharding(WHOLE) == ((0,), (), (), (0,))


def test_parameters_results_and_donations_are_annotated() -> None:
    found = annotate(module(), {0: HALVES, 1: WHOLE}, {0: HALVES}, {0})
    assert shardings_of_parameters(found) == {0: HALVES, 1: WHOLE}
    assert donated(found) == {0}
    # The negation in the entry is annotated, its namesake is not: beside the two parameters one instruction is longer.
    assert found.count(HALVES) == 2
    # A second annotation replaces the first.
    assert shardings_of_parameters(annotate(found, {0: WHOLE}, {}, ()))[0] == WHOLE
    assert annotate(module(), {}, {}, ()) == module()
