"""`Body`: the instructions of a computation that is written."""

from __future__ import annotations

from collections.abc import Sequence

from xla_adapters.hlo_graph import wire
from xla_adapters.hlo_graph.graph import (
    CALLED,
    COMPUTATION_ID,
    COMPUTATION_NAME,
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
from xla_adapters.hlo_graph.shapes import S32, U32, array_shape

# The shape of what is counted.
COUNT = array_shape(S32)
# Of ProgramShapeProto.
_PARAMETERS, _RESULT, _PARAMETER_NAMES = 1, 2, 3
# Of LiteralProto: its shape, and its numbers by their type.
_LITERAL_SHAPE, _LITERAL_NUMBERS = 1, {S32: 4, U32: 6}
# Frontend attributes (a map of strings): XLA leaves such a call as it is.
_NOT_INLINED = wire.message(
    FRONTEND_ATTRIBUTES, wire.message(1, wire.message(1, b"inlineable") + wire.message(2, b"false"))
)


class Numbers:
    """Numbers that no other instruction or computation of the module has."""

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        """The next one."""
        self._last += 1
        return self._last


class Body:
    """The instructions of a computation.

    Args:
        nodes: what may be written.
        numbers: for its instructions.
        called: the numbers of the computations that nodes call.

    Attributes:
        instructions: as messages.
        at: the number of the instruction that has a node's value.
    """

    def __init__(self, nodes: Sequence[Node], numbers: Numbers, called: Sequence[int]) -> None:
        self._nodes = nodes
        self._numbers = numbers
        self._called = called
        self.instructions: list[bytes] = []
        self.at: dict[int, int] = {}

    def copy(self, place: int) -> None:
        """A node, whose operands are there."""
        self.write(place, [self.at[operand] for operand in self._nodes[place].operands])

    def write(self, place: int, operands: Sequence[int]) -> None:
        """A node that reads these instructions."""
        self.at[place] = self.again(place, operands)

    def again(self, place: int, operands: Sequence[int]) -> int:
        """As `write`, of a node that may be there; returns the instruction's number."""
        node = self._nodes[place]
        called = [self._called[item] for item in node.called]
        return self.add(node.opcode, node.shape, operands, node.rest + wire.numbers(CALLED, called))

    def constant(self, place: int) -> int:
        """A node that depends on no parameter, with all it depends on."""
        if place not in self.at:
            for operand in self._nodes[place].operands:
                self.constant(operand)
            self.copy(place)
        return self.at[place]

    def parameter(self, position: int, shape: bytes) -> int:
        """A parameter of the computation."""
        return self.add("parameter", shape, (), wire.number(PARAMETER_NUMBER, position))

    def together(self, operands: Sequence[int], shape: bytes) -> int:
        """Several values in one."""
        return self.add("tuple", shape, operands)

    def call(self, body: tuple[int, bytes], operands: Sequence[int]) -> int:
        """A call of a computation, by its number and the shape of its result."""
        identity, shape = body
        return self.add("call", shape, operands, wire.numbers(CALLED, [identity]) + _NOT_INLINED)

    def element(self, whole: int, index: int, shape: bytes) -> int:
        """One of several values."""
        return self.add("get-tuple-element", shape, (whole,), wire.number(TUPLE_INDEX, index))

    def count(self, value: int) -> int:
        """A constant of the shape `COUNT`, by its value, which is not negative."""
        return self.add("constant", COUNT, (), literal(S32, value))

    def counted_on(self, count: int, by: int) -> int:
        """What a call hands on to the next one of the same computation, so that each is told where its part begins.

        A part of a value that begins at a constant would be compiled to a kernel of its own for each. Two operations,
        since XLA shares the kernel of alike fusions, and compiles each single operation by itself.
        """
        return self.add("maximum", COUNT, [self.add("add", COUNT, [count, self.count(by)]), self.count(0)])

    def add(self, opcode: str, shape: bytes, operands: Sequence[int], rest: bytes = b"") -> int:
        """An instruction, by its result's shape and its fields as they are written; returns its number."""
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
        """The whole, as a HloComputationProto.

        Args:
            name: of its own.
            identity: its number.
            root: the instruction that has the result.
            program_shape: as a message.
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


def copied_computations(computations: Sequence[Computation], numbers: Numbers) -> tuple[list[bytes], list[int]]:
    """What a graph's nodes call, written as it was: as messages, and the numbers they have now."""
    texts: list[bytes] = []
    called: list[int] = []
    for computation in computations:
        body = Body(computation.nodes, numbers, called)
        for place in range(len(computation.nodes)):
            body.copy(place)
        identity = numbers.next()
        root = body.at[computation.root]
        texts.append(body.computation(f"called.{identity}", identity, root, computation.program_shape))
        called.append(identity)
    return texts, called


def literal(kind: int, value: int) -> bytes:
    """The field of a constant that holds a single whole number.

    Args:
        kind: `S32` or `U32`.
        value: not negative.
    """
    return wire.message(
        LITERAL,
        wire.message(_LITERAL_SHAPE, array_shape(kind)) + wire.numbers(_LITERAL_NUMBERS[kind], [value]),
    )


def program_shape(given: Sequence[bytes], result: bytes) -> bytes:
    """What a computation reads and hands out, as a ProgramShapeProto."""
    return b"".join(
        (
            *(wire.message(_PARAMETERS, shape) for shape in given),
            wire.message(_RESULT, result),
            *(wire.message(_PARAMETER_NAMES, f"p{number}".encode()) for number in range(len(given))),
        )
    )


def written_module(computations: Sequence[bytes], name: str, entry: int, program_shape: bytes) -> bytes:
    """A HloModuleProto.

    Args:
        computations: those that others call first.
        name: of the entry.
        entry: its number.
        program_shape: of the entry, as a message.
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
