"""`Graph`: the entry computation of an HLO module, as nodes that can be compared.

Source: `xla/service/hlo.proto` (numbers of fields).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xla_adapters.hlo_graph import wire
from xla_adapters.hlo_graph.shapes import is_dynamic

# Of HloModuleProto.
MODULE_NAME, MODULE_ENTRY_NAME, MODULE_COMPUTATIONS, MODULE_PROGRAM_SHAPE, MODULE_ID, MODULE_ENTRY = 1, 2, 3, 4, 5, 6
# Of HloComputationProto.
COMPUTATION_NAME, INSTRUCTIONS, PROGRAM_SHAPE, COMPUTATION_ID, ROOT = 1, 2, 4, 5, 6
# Of HloInstructionProto.
NAME, OPCODE, SHAPE, METADATA, LITERAL, PARAMETER_NUMBER, TUPLE_INDEX = 1, 2, 3, 7, 8, 9, 13
DIMENSIONS = 14
SLICE_SIZES, COMPARISON_DIRECTION = 20, 63
ID, OPERANDS, CONTROL_PREDECESSORS, CALLED, FRONTEND_ATTRIBUTES = 35, 36, 37, 38, 68
# What is not the same twice, even of the same operands.
_STATEFUL = frozenset(("parameter", "rng", "rng-get-and-update-state", "custom-call", "after-all"))
# What moves values between devices, or between device and host; and marks for that.
_NOT_OF_ONE_DEVICE = frozenset(
    {
        "all-gather",
        "all-reduce",
        "all-to-all",
        "collective-broadcast",
        "collective-permute",
        "domain",
        "infeed",
        "outfeed",
        "partition-id",
        "recv",
        "reduce-scatter",
        "replica-id",
        "send",
    }
)
# A constant is made anew in each block, with all that it is made of: few of these.
_MADE_ANEW = frozenset(
    {
        "add",
        "and",
        "bitcast-convert",
        "broadcast",
        "compare",
        "constant",
        "convert",
        "divide",
        "iota",
        "multiply",
        "negate",
        "not",
        "or",
        "reshape",
        "select",
        "slice",
        "subtract",
        "transpose",
    }
)
_DEEPEST_CONSTANT = 32


class NotUnderstood(Exception):
    """A module holds what is not known here."""


@dataclass(slots=True)
class Node:
    """An instruction.

    Attributes:
        opcode: as in HLO.
        shape: of its result, as a message.
        rest: its other fields as they are written, without names and numbers.
        operands: the positions of other nodes.
        called: positions of computations among the module's.
    """

    opcode: str
    shape: bytes
    rest: bytes
    operands: tuple[int, ...]
    called: tuple[int, ...] = ()


@dataclass
class Computation:
    """Instructions.

    Attributes:
        nodes: each behind its operands.
        root: the position of the result.
        program_shape: as a message.
        stateful: whether it is not the same twice, even of the same arguments.
    """

    nodes: list[Node]
    root: int
    program_shape: bytes
    stateful: bool = False


class Graph(Computation):
    """The entry of a module; if they are merged, equal nodes are one, but for parameters.

    Attributes:
        called: what nodes call; equal ones are one, and those that others call come first.
        operands: of each node.
        users: of each node, the nodes that read it.
        kinds: equal for nodes that differ at most in which values they read, of the same shapes.
        constant: whether a node is made of few others and depends on no parameter.
        inputs: the parameters, by their number.
    """

    def __init__(self, entry: Computation, called: list[Computation], *, merged: bool) -> None:
        super().__init__(*_kept_nodes(entry, called, merged), entry.program_shape)
        self.called = called
        self.operands = [node.operands for node in self.nodes]
        self.users: list[list[int]] = [[] for _ in self.nodes]
        self.kinds: list[int] = []
        self.constant: list[bool] = []
        kinds: dict[object, int] = {}
        depth: list[int] = []
        parameters = [place for place, node in enumerate(self.nodes) if node.opcode == "parameter"]
        self.inputs = sorted(parameters, key=lambda place: _parameter_number(self.nodes[place]))
        for place, node in enumerate(self.nodes):
            for operand in dict.fromkeys(node.operands):
                self.users[operand].append(place)
            # Parameters are alike, whatever their number.
            rest = b"" if node.opcode == "parameter" else node.rest
            reads = tuple(self.nodes[operand].shape for operand in node.operands)
            kind = (node.opcode, node.shape, rest, node.called, reads)
            self.kinds.append(kinds.setdefault(kind, len(kinds)))
            depth.append(1 + max((depth[operand] for operand in node.operands), default=0))
            self.constant.append(
                node.opcode in _MADE_ANEW
                and depth[-1] <= _DEEPEST_CONSTANT
                and all(self.constant[operand] for operand in node.operands)
            )


def read(module: bytes, *, merged: bool = True) -> Graph:
    """The graph of a module (HloModuleProto).

    Args:
        module: as it is written.
        merged: whether equal nodes of equal operands become one.

    Raises:
        NotUnderstood: it holds something that is not known here.
    """
    try:
        return _read(module, merged)
    except (IndexError, KeyError, ValueError) as error:
        raise NotUnderstood(f"the module is not written as expected ({error!r})") from error


def _read(module: bytes, merged: bool) -> Graph:
    texts: list[bytes] = []
    entry = 0
    for number, value, _ in wire.fields(module):
        if number == MODULE_COMPUTATIONS:
            texts.append(_bytes(value))
        elif number == MODULE_ENTRY:
            entry = _int(value)
        elif number not in (MODULE_NAME, MODULE_ENTRY_NAME, MODULE_PROGRAM_SHAPE, MODULE_ID) and value:
            raise NotUnderstood(f"the module has a field {number}")
    known: dict[tuple[object, ...], int] = {}
    called: list[Computation] = []
    places: dict[int, int] = {}
    for text in texts:
        identity, computation = _computation(text, places)
        if identity == entry:
            return Graph(computation, called, merged=merged)
        computation.stateful = any(
            node.opcode != "parameter" and _is_stateful(node, called) for node in computation.nodes
        )
        nodes = tuple((node.opcode, node.shape, node.rest, node.operands, node.called) for node in computation.nodes)
        content = (nodes, computation.root)
        if content not in known:
            known[content] = len(called)
            called.append(computation)
        places[identity] = known[content]
    raise NotUnderstood("the module has no entry")


def _computation(text: bytes, places: dict[int, int]) -> tuple[int, Computation]:
    """Its number, and what it does."""
    identity = root = 0
    shape = b""
    nodes: list[Node] = []
    positions: dict[int, int] = {}
    for number, value, _ in wire.fields(text):
        if number == INSTRUCTIONS:
            own, node = _node(_bytes(value), positions, places)
            positions[own] = len(nodes)
            nodes.append(node)
        elif number == COMPUTATION_ID:
            identity = _int(value)
        elif number == ROOT:
            root = _int(value)
        elif number == PROGRAM_SHAPE:
            shape = _bytes(value)
    return identity, Computation(nodes, positions[root], shape)


def _node(text: bytes, positions: dict[int, int], places: dict[int, int]) -> tuple[int, Node]:
    identity = 0
    opcode, shape, rest = "", b"", []
    operands: list[int] = []
    called: list[int] = []
    for number, value, written in wire.fields(text):
        if number == ID:
            identity = _int(value)
        elif number == OPCODE:
            opcode = _bytes(value).decode()
        elif number == SHAPE:
            shape = _bytes(value)
        elif number == OPERANDS:
            operands += wire.integers(value)
        elif number == CALLED:
            called += wire.integers(value)
        elif number == CONTROL_PREDECESSORS and value:
            raise NotUnderstood("an instruction waits for another one")
        elif number not in (NAME, METADATA):
            rest.append(written)
    if opcode in _NOT_OF_ONE_DEVICE or is_dynamic(shape):
        raise NotUnderstood(f"the module has a {opcode} of several devices, of the host, or of unknown size")
    node = Node(
        opcode,
        shape,
        b"".join(rest),
        tuple(positions[operand] for operand in operands),
        tuple(places[item] for item in called),
    )
    return identity, node


def _kept_nodes(entry: Computation, called: Sequence[Computation], merged: bool) -> tuple[list[Node], int]:
    """Nodes that nobody uses are dropped; equal nodes of equal operands become one, if they shall be merged."""
    used = {entry.root}
    for position in range(len(entry.nodes) - 1, -1, -1):
        if position in used:
            used.update(entry.nodes[position].operands)
    kept: list[Node] = []
    now: dict[int, int] = {}
    known: dict[tuple[object, ...], int] = {}
    for position, node in enumerate(entry.nodes):
        stateful = _is_stateful(node, called)
        if position not in used and node.opcode != "parameter":
            if stateful:
                raise NotUnderstood(f"a {node.opcode} has no result that is used, and may have an effect")
            continue
        operands = tuple(now[operand] for operand in node.operands)
        key = (node.opcode, node.shape, node.rest, operands, node.called)
        if stateful or not merged or key not in known:
            known[key] = len(kept)
            kept.append(Node(node.opcode, node.shape, node.rest, operands, node.called))
        now[position] = known[key]
    return kept, now[entry.root]


def first_equals(graph: Graph) -> list[int]:
    """For each node the first one that is the same operation of the same values."""
    known: dict[tuple[object, ...], int] = {}
    found: list[int] = []
    for place, node in enumerate(graph.nodes):
        key = (node.opcode, node.shape, node.rest, tuple(found[operand] for operand in node.operands), node.called)
        found.append(place if _is_stateful(node, graph.called) else known.setdefault(key, place))
    return found


def _parameter_number(node: Node) -> int:
    return next((_int(value) for number, value, _ in wire.fields(node.rest) if number == PARAMETER_NUMBER), 0)


def _is_stateful(node: Node, called: Sequence[Computation]) -> bool:
    return node.opcode in _STATEFUL or any(called[place].stateful for place in node.called)


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise NotUnderstood("a number where a message was expected")
    return value


def _int(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise NotUnderstood("a message where a number was expected")
    return value
