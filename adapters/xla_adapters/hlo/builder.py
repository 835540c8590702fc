"""Writes HLO: `ComputationBuilder` and `Arithmetic` make computations, `annotate` adds shardings and donations.

Source: `xla/service/hlo.proto` and `xla/xla_data.proto` (numbers of fields and types).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence

from xla_adapters.hlo import wire
from xla_adapters.hlo.graph import (
    CALLED,
    COMPARISON_DIRECTION,
    COMPUTATION_ID,
    COMPUTATION_NAME,
    DIMENSIONS,
    FRONTEND_ATTRIBUTES,
    ID,
    INSTRUCTIONS,
    LITERAL,
    MODULE_COMPUTATIONS,
    MODULE_ENTRY,
    MODULE_ENTRY_NAME,
    MODULE_NAME,
    MODULE_PROGRAM_SHAPE,
    NAME,
    OPCODE,
    OPERANDS,
    PARAMETER_NUMBER,
    PROGRAM_SHAPE,
    ROOT,
    SHAPE,
    TUPLE_INDEX,
    Computation,
    Node,
)
from xla_adapters.hlo.wire import PRED, S32, U32, array_shape

# The shape of loop counters and indices.
COUNT = array_shape(S32)
# Field numbers of ProgramShapeProto.
_PARAMETERS, _RESULT, _PARAMETER_NAMES = 1, 2, 3
# Field numbers of LiteralProto: the shape, and the values by PrimitiveType.
_LITERAL_SHAPE, _LITERAL_NUMBERS = 1, {S32: 4, U32: 6}
# Frontend attributes (a map of strings) of a call that XLA must not inline.
_NOT_INLINED = wire.message(
    FRONTEND_ATTRIBUTES, wire.message(1, wire.message(1, b"inlineable") + wire.message(2, b"false"))
)


class IdCounter:
    """Gives out ids for the instructions and computations of one module, each id once."""

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        """The next id."""
        self._last += 1
        return self._last


class ComputationBuilder:
    """Writes one HLO computation: new instructions, and copies of the nodes of a graph.

    Methods that append an instruction return its id.

    Args:
        nodes: the graph's nodes, which may be copied into the computation.
        numbers: gives out instruction ids.
        called: per computation in `Graph.called`, its id in the written module.

    Attributes:
        instructions: encoded HloInstructionProtos.
        at: by position of a node, the id of the instruction that has its value here.
    """

    def __init__(self, nodes: Sequence[Node], numbers: IdCounter, called: Sequence[int]) -> None:
        self._nodes = nodes
        self._numbers = numbers
        self._called = called
        self.instructions: list[bytes] = []
        self.at: dict[int, int] = {}

    def copy(self, place: int) -> None:
        """Copies a node, whose operands are already in `at`."""
        self.write(place, [self.at[operand] for operand in self._nodes[place].operands])

    def write(self, place: int, operands: Sequence[int]) -> None:
        """Copies a node, with these instructions as its operands, and notes it in `at`."""
        self.at[place] = self.emit(place, operands)

    def emit(self, place: int, operands: Sequence[int]) -> int:
        """As `write`, without noting it in `at`."""
        node = self._nodes[place]
        called = [self._called[item] for item in node.called]
        return self.add(node.opcode, node.shape, operands, node.rest + wire.numbers(CALLED, called))

    def constant(self, place: int) -> int:
        """Copies a constant expression with all its operands, unless it is already here."""
        if place not in self.at:
            for operand in self._nodes[place].operands:
                self.constant(operand)
            self.copy(place)
        return self.at[place]

    def parameter(self, position: int, shape: bytes) -> int:
        """Appends a parameter of the computation."""
        return self.add("parameter", shape, (), wire.number(PARAMETER_NUMBER, position))

    def make_tuple(self, operands: Sequence[int], shape: bytes) -> int:
        """Appends a tuple of values."""
        return self.add("tuple", shape, operands)

    def call(self, body: tuple[int, bytes], operands: Sequence[int]) -> int:
        """Appends a call that XLA does not inline.

        Args:
            body: id of the called computation, and the shape of its result.
            operands: ids of the arguments.
        """
        identity, shape = body
        return self.add("call", shape, operands, wire.numbers(CALLED, [identity]) + _NOT_INLINED)

    def tuple_element(self, whole: int, index: int, shape: bytes) -> int:
        """Appends the element at `index` of a tuple."""
        return self.add("get-tuple-element", shape, (whole,), wire.number(TUPLE_INDEX, index))

    def index_constant(self, value: int) -> int:
        """Appends a scalar constant of shape `COUNT`; the value must not be negative."""
        return self.add("constant", COUNT, (), literal(S32, value))

    def next_index(self, count: int, by: int) -> int:
        """Appends `count + by`: the index that a call returns for the next call of the same computation.

        A slice at a constant index would be compiled to a kernel of its own per call; with the index as an argument,
        calls share one. It takes two operations because XLA shares kernels of equal fusions only, and an operation
        alone is no fusion.
        """
        return self.add(
            "maximum", COUNT, [self.add("add", COUNT, [count, self.index_constant(by)]), self.index_constant(0)]
        )

    def add(self, opcode: str, shape: bytes, operands: Sequence[int], rest: bytes = b"") -> int:
        """Appends an instruction.

        Args:
            opcode: HLO opcode.
            shape: of the result (ShapeProto).
            operands: ids of the operands.
            rest: further encoded fields of the HloInstructionProto.
        """
        identity = self._numbers.next()
        self.instructions.append(
            b"".join(
                (
                    wire.message(NAME, f"{opcode}.{identity}".encode()),
                    wire.message(OPCODE, opcode.encode()),
                    wire.message(SHAPE, shape),
                    rest,
                    wire.number(ID, identity),
                    wire.numbers(OPERANDS, operands),
                )
            )
        )
        return identity

    def computation(self, name: str, identity: int, root: int, program_shape: bytes) -> bytes:
        """The encoded HloComputationProto.

        Args:
            name: of the computation.
            identity: its id.
            root: id of the instruction that has the result.
            program_shape: the ProgramShapeProto.
        """
        return b"".join(
            (
                wire.message(COMPUTATION_NAME, name.encode()),
                *(wire.message(INSTRUCTIONS, text) for text in self.instructions),
                wire.message(PROGRAM_SHAPE, program_shape),
                wire.number(COMPUTATION_ID, identity),
                wire.number(ROOT, root),
            )
        )


def copied_computations(computations: Sequence[Computation], numbers: IdCounter) -> tuple[list[bytes], list[int]]:
    """Copies the computations that a graph's nodes call, with new ids.

    Returns:
        The encoded HloComputationProtos, and their ids.
    """
    texts: list[bytes] = []
    called: list[int] = []
    for computation in computations:
        body = ComputationBuilder(computation.nodes, numbers, called)
        for place in range(len(computation.nodes)):
            body.copy(place)
        identity = numbers.next()
        root = body.at[computation.root]
        texts.append(body.computation(f"called.{identity}", identity, root, computation.program_shape))
        called.append(identity)
    return texts, called


def literal(kind: int, value: int) -> bytes:
    """Encodes the literal field of a scalar constant.

    Args:
        kind: `S32` or `U32`.
        value: must not be negative.
    """
    return wire.message(
        LITERAL,
        wire.message(_LITERAL_SHAPE, array_shape(kind)) + wire.numbers(_LITERAL_NUMBERS[kind], [value]),
    )


def program_shape(given: Sequence[bytes], result: bytes) -> bytes:
    """The ProgramShapeProto of a computation with these parameter shapes and this result."""
    return b"".join(
        (
            *(wire.message(_PARAMETERS, shape) for shape in given),
            wire.message(_RESULT, result),
            *(wire.message(_PARAMETER_NAMES, f"p{number}".encode()) for number in range(len(given))),
        )
    )


def written_module(computations: Sequence[bytes], name: str, entry: int, program_shape: bytes) -> bytes:
    """Encodes an HloModuleProto.

    Args:
        computations: encoded HloComputationProtos, callees first.
        name: of the entry computation.
        entry: its id.
        program_shape: its ProgramShapeProto.
    """
    return b"".join(
        (
            wire.message(MODULE_NAME, name.encode()),
            wire.message(MODULE_ENTRY_NAME, name.encode()),
            *(wire.message(MODULE_COMPUTATIONS, text) for text in computations),
            wire.message(MODULE_PROGRAM_SHAPE, program_shape),
            wire.number(MODULE_ENTRY, entry),
        )
    )


Sizes = tuple[int, ...]


class Arithmetic:
    """Builds a computation on u32 arrays; sums and products are modulo 2**32.

    Methods append an instruction and return its id. `sizes` are the dimensions of the result, () for a scalar.

    Args:
        numbers: gives out instruction ids.
        given: the shapes of the computation's parameters (ShapeProto).

    Attributes:
        parameters: the instruction id of each parameter.
    """

    def __init__(self, numbers: IdCounter, given: Sequence[bytes]) -> None:
        self._numbers = numbers
        self._given = given
        self._body = ComputationBuilder((), numbers, ())
        self.parameters = [self._body.parameter(position, shape) for position, shape in enumerate(given)]

    def constant(self, value: int, sizes: Sizes = ()) -> int:
        """An array with `value` in each element."""
        return self.broadcast(self._body.add("constant", array_shape(U32), (), literal(U32, value)), sizes)

    def broadcast(self, number: int, sizes: Sizes) -> int:
        """An array with the scalar of instruction `number` in each element."""
        return self._body.add("broadcast", array_shape(U32, *sizes), (number,)) if sizes else number

    def iota(self, size: int) -> int:
        """The vector 0, 1, ..., size - 1."""
        return self._body.add("iota", array_shape(U32, size), (), wire.numbers(DIMENSIONS, [0]))

    def apply(self, opcode: str, sizes: Sizes, *operands: int) -> int:
        """An element-wise operation, by its HLO opcode."""
        return self._body.add(opcode, array_shape(U32, *sizes), operands)

    def less(self, one: int, other: int, sizes: Sizes) -> int:
        """A boolean array: element-wise `one < other`."""
        return self._body.add(
            "compare", array_shape(PRED, *sizes), (one, other), wire.message(COMPARISON_DIRECTION, b"LT")
        )

    def reshape(self, value: int, shape: bytes) -> int:
        """The same elements with another shape (ShapeProto)."""
        return self._body.add("reshape", shape, (value,))

    def finish(self, name: str, results: Sequence[int], shape: bytes) -> tuple[int, bytes]:
        """Ends the computation.

        Args:
            name: the prefix of its name; the id is appended.
            results: ids of the instructions that it returns as a tuple.
            shape: of that tuple (ShapeProto).

        Returns:
            Its id, and the computation as a HloComputationProto.
        """
        root = self._body.make_tuple(results, shape)
        identity = self._numbers.next()
        text = self._body.computation(f"{name}.{identity}", identity, root, program_shape(self._given, shape))
        return identity, text


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
