"""`cost_of`: what an HLO module reads, returns and computes.

FLOPs are those of matrix products and convolutions, 2 for a multiplication with its addition, as a model's FLOPs are
usually given. Source: `xla/service/hlo.proto` and `xla/xla_data.proto` (numbers of fields).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from xla_adapters.hlo import protobuf
from xla_adapters.hlo.protobuf import (
    CALLED,
    COMPUTATION_ID,
    ID,
    INSTRUCTIONS,
    MODULE_COMPUTATIONS,
    MODULE_ENTRY,
    OPCODE,
    OPERANDS,
    PROGRAM_SHAPE,
    ROOT,
    SHAPE,
)

# Fields of HloInstructionProto and of the messages in them.
_WINDOW, _CONVOLUTION_DIMENSIONS, _DOT_DIMENSIONS = 15, 16, 30
_LHS_CONTRACTING, _KERNEL_OUTPUT_FEATURE, _WINDOW_DIMENSIONS, _BASE_DILATION = 1, 4, 1, 6
# Fields of ProgramShapeProto and ShapeProto.
_PROGRAM_PARAMETERS, _PROGRAM_RESULT, _TUPLE_SHAPES = 1, 2, 4


Fields = dict[int, list[Any]]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a module needs.

    Attributes:
        operations: instructions of all its computations that a result needs.
        inputs, outputs: how many arrays it reads and returns.
        input_bytes, output_bytes: how large they are.
        flops: of matrix products and convolutions; None if some are in a loop, whose number of turns the module does
            not say.
    """

    operations: int
    inputs: int
    outputs: int
    input_bytes: int
    output_bytes: int
    flops: int | None


@dataclass
class _Computation:
    """FLOPs of its own instructions, the computations that it calls, and those that it calls in a loop."""

    operations: int
    program: Fields
    flops: int = 0
    called: list[int] = field(default_factory=list)
    looped: list[int] = field(default_factory=list)


def cost_of(module: bytes) -> Cost:
    """The cost of a module.

    Args:
        module: an encoded HloModuleProto.

    Raises:
        ValueError: it is not one.
    """
    parts = protobuf.by_number(module)
    computations = dict(map(_computation, parts.get(MODULE_COMPUTATIONS, ())))
    entry = protobuf.first(parts, MODULE_ENTRY)
    if entry not in computations:
        raise ValueError("the module has no entry")
    program = computations[entry].program
    given, results = (
        [array for shape in program.get(number, ()) for array in _flat(shape)]
        for number in (_PROGRAM_PARAMETERS, _PROGRAM_RESULT)
    )
    return Cost(
        operations=sum(item.operations for item in computations.values()),
        inputs=len(given),
        outputs=len(results),
        input_bytes=sum(map(protobuf.byte_size, given)),
        output_bytes=sum(map(protobuf.byte_size, results)),
        flops=_flops(entry, computations),
    )


def _flops(entry: int, computations: dict[int, _Computation]) -> int | None:
    known: dict[int, int | None] = {}
    # Callees come before their callers.
    for identity, item in computations.items():
        parts = [known[callee] for callee in item.called]
        unknown = None in parts or any(known[callee] != 0 for callee in item.looped)
        known[identity] = None if unknown else item.flops + sum(part for part in parts if part is not None)
    return known[entry]


def _computation(text: bytes) -> tuple[int, _Computation]:
    parts = protobuf.by_number(text)
    instructions = {protobuf.first(item, ID): item for item in map(protobuf.by_number, parts.get(INSTRUCTIONS, ()))}
    # XLA drops what no result needs, such as the gradient of an input that nobody asked for.
    root = protobuf.first(parts, ROOT)
    used, waiting = {root}, [root]
    while waiting:
        new = set(protobuf.packed(instructions[waiting.pop()], OPERANDS)) - used
        used |= new
        waiting += new
    found = _Computation(operations=len(used), program=protobuf.by_number(protobuf.first(parts, PROGRAM_SHAPE, b"")))
    for own in used:
        instruction = instructions[own]
        in_loop = protobuf.first(instruction, OPCODE) == b"while"
        (found.looped if in_loop else found.called).extend(protobuf.packed(instruction, CALLED))
        found.flops += _own_flops(instruction, instructions)
    return protobuf.first(parts, COMPUTATION_ID), found


def _own_flops(instruction: Fields, instructions: dict[int, Fields]) -> int:
    opcode = protobuf.first(instruction, OPCODE)
    if opcode not in (b"dot", b"convolution"):
        return 0
    result = protobuf.first(instruction, SHAPE, b"")
    left, right = (
        protobuf.first(instructions[item], SHAPE, b"") for item in protobuf.packed(instruction, OPERANDS)[:2]
    )
    if opcode == b"dot":
        contracted = protobuf.packed(
            protobuf.by_number(protobuf.first(instruction, _DOT_DIMENSIONS, b"")), _LHS_CONTRACTING
        )
        return 2 * protobuf.count(result) * math.prod(protobuf.dimensions(left)[axis] for axis in contracted)
    return _convolution(result, right, instruction)


def _convolution(result: bytes, kernel: bytes, instruction: Fields) -> int:
    dimensions = protobuf.by_number(protobuf.first(instruction, _CONVOLUTION_DIMENSIONS, b""))
    features: int = protobuf.dimensions(kernel)[protobuf.first(dimensions, _KERNEL_OUTPUT_FEATURE)]
    # Where the input is dilated (the gradient of a strided convolution), the zeros between are not computed with.
    zeros = 1
    for window in protobuf.by_number(protobuf.first(instruction, _WINDOW, b"")).get(_WINDOW_DIMENSIONS, ()):
        zeros *= max(1, int(protobuf.first(protobuf.by_number(window), _BASE_DILATION, 1)))
    found: int = 2 * protobuf.count(result) * protobuf.count(kernel) // max(features, 1) // zeros
    return found


def _flat(shape: bytes) -> Iterator[bytes]:
    """The shapes of the arrays in a shape, those of a tuple one by one."""
    parts = protobuf.by_number(shape).get(_TUPLE_SHAPES)
    if parts is None:
        yield shape
    for part in parts or ():
        yield from _flat(part)
