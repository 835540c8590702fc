"""`cost_of`: what an HLO module reads, returns and computes.

FLOPs are those of matrix products and convolutions, 2 for a multiplication with its addition, as a model's FLOPs are
usually given. Source: `xla/service/hlo.proto` and `xla/xla_data.proto` (numbers of fields).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from xla_adapters.hlo import wire
from xla_adapters.hlo.graph import (
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
class _Instruction:
    """One instruction; `fields` has those that are needed, as encoded, by their numbers."""

    opcode: bytes = b""
    operands: tuple[int, ...] = ()
    called: tuple[int, ...] = ()
    fields: dict[int, bytes] = field(default_factory=dict)

    @property
    def shape(self) -> bytes:
        """Of its result (ShapeProto)."""
        return self.fields.get(SHAPE, b"")


@dataclass
class _Computation:
    """FLOPs of its own instructions, the computations that it calls, and those that it calls in a loop."""

    operations: int = 0
    flops: int = 0
    called: tuple[int, ...] = ()
    looped: tuple[int, ...] = ()
    shape: bytes = b""


def cost_of(module: bytes) -> Cost:
    """The cost of a module.

    Args:
        module: an encoded HloModuleProto.

    Raises:
        ValueError: it is not one.
    """
    computations: dict[int, _Computation] = {}
    entry = 0
    for number, value, _ in wire.fields(module):
        if number == MODULE_COMPUTATIONS:
            identity, found = _computation(_message(value))
            computations[identity] = found
        elif number == MODULE_ENTRY:
            entry = _integer(value)
    if entry not in computations:
        raise ValueError("the module has no entry")
    given = _arrays(computations[entry].shape, _PROGRAM_PARAMETERS)
    results = _arrays(computations[entry].shape, _PROGRAM_RESULT)
    return Cost(
        operations=sum(item.operations for item in computations.values()),
        inputs=len(given),
        outputs=len(results),
        input_bytes=sum(map(wire.byte_size, given)),
        output_bytes=sum(map(wire.byte_size, results)),
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
    identity = root = 0
    shape = b""
    instructions: dict[int, _Instruction] = {}
    for number, value, _ in wire.fields(text):
        if number == INSTRUCTIONS:
            own, instruction = _instruction(_message(value))
            instructions[own] = instruction
        elif number == COMPUTATION_ID:
            identity = _integer(value)
        elif number == ROOT:
            root = _integer(value)
        elif number == PROGRAM_SHAPE:
            shape = _message(value)
    # XLA drops what no result needs, such as the gradient of an input that nobody asked for.
    used, waiting = {root}, [root]
    while waiting:
        new = set(instructions[waiting.pop()].operands) - used
        used |= new
        waiting += new
    found = _Computation(operations=len(used), shape=shape)
    for own in used:
        instruction = instructions[own]
        if instruction.opcode == b"while":
            found.looped += instruction.called
        else:
            found.called += instruction.called
        found.flops += _own_flops(instruction, instructions)
    return identity, found


def _instruction(text: bytes) -> tuple[int, _Instruction]:
    identity = 0
    found = _Instruction()
    for number, value, _ in wire.fields(text):
        if number == ID:
            identity = _integer(value)
        elif number == OPCODE:
            found.opcode = _message(value)
        elif number == OPERANDS:
            found.operands += tuple(wire.integers(value))
        elif number == CALLED:
            found.called += tuple(wire.integers(value))
        elif number in (SHAPE, _WINDOW, _CONVOLUTION_DIMENSIONS, _DOT_DIMENSIONS):
            found.fields[number] = _message(value)
    return identity, found


def _own_flops(instruction: _Instruction, instructions: dict[int, _Instruction]) -> int:
    shape, fields = instruction.shape, instruction.fields
    if instruction.opcode == b"dot":
        contracted = _numbers(fields.get(_DOT_DIMENSIONS, b""), _LHS_CONTRACTING)
        sizes = wire.dimensions(instructions[instruction.operands[0]].shape)
        return 2 * wire.count(shape) * math.prod(sizes[axis] for axis in contracted)
    if instruction.opcode == b"convolution":
        return _convolution(shape, instructions[instruction.operands[1]].shape, fields)
    return 0


def _convolution(result: bytes, kernel: bytes, fields: dict[int, bytes]) -> int:
    (features,) = _numbers(fields.get(_CONVOLUTION_DIMENSIONS, b""), _KERNEL_OUTPUT_FEATURE) or [0]
    # Where the input is dilated (the gradient of a strided convolution), the zeros between are not computed with.
    zeros = 1
    for number, value, _ in wire.fields(fields.get(_WINDOW, b"")):
        if number == _WINDOW_DIMENSIONS:
            zeros *= max([1, *_numbers(_message(value), _BASE_DILATION)])
    sizes = wire.dimensions(kernel)
    return 2 * wire.count(result) * wire.count(kernel) // max(sizes[features], 1) // zeros


def _numbers(text: bytes, field: int) -> list[int]:
    return [item for number, value, _ in wire.fields(text) if number == field for item in wire.integers(value)]


def _arrays(program: bytes, field: int) -> list[bytes]:
    """The shapes of the arrays in a field of a ProgramShapeProto, those of tuples one by one."""
    return [array for number, value, _ in wire.fields(program) if number == field for array in _flat(_message(value))]


def _flat(shape: bytes) -> Iterator[bytes]:
    parts = [_message(value) for number, value, _ in wire.fields(shape) if number == _TUPLE_SHAPES]
    if not parts:
        yield shape
    for part in parts:
        yield from _flat(part)


def _message(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where a message was expected")
    return value


def _integer(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("a message where a number was expected")
    return value
