"""`Graph`: the entry computation of an HLO module, as nodes that can be compared and ordered.

A node is identified by its position in `Graph.nodes`; variables named `place` hold such a position.

Source: `xla/service/hlo.proto` (numbers of fields).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from xla_adapters.hlo import wire
from xla_adapters.hlo.wire import is_dynamic

# Field numbers of HloModuleProto.
MODULE_NAME, MODULE_ENTRY_NAME, MODULE_COMPUTATIONS, MODULE_PROGRAM_SHAPE, MODULE_ID, MODULE_ENTRY = 1, 2, 3, 4, 5, 6
# Field numbers of HloComputationProto.
COMPUTATION_NAME, INSTRUCTIONS, PROGRAM_SHAPE, COMPUTATION_ID, ROOT = 1, 2, 4, 5, 6
# Field numbers of HloInstructionProto.
NAME, OPCODE, SHAPE, METADATA, LITERAL, PARAMETER_NUMBER, TUPLE_INDEX = 1, 2, 3, 7, 8, 9, 13
DIMENSIONS = 14
SLICE_SIZES, COMPARISON_DIRECTION = 20, 63
ID, OPERANDS, CONTROL_PREDECESSORS, CALLED, FRONTEND_ATTRIBUTES = 35, 36, 37, 38, 68
# Opcodes that may give different results for the same operands.
_STATEFUL = frozenset(("parameter", "rng", "rng-get-and-update-state", "custom-call", "after-all"))
# Opcodes that exchange values with other devices or with the host.
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
# Opcodes of constant expressions. Each computation that reads one gets its own copy, so only cheap opcodes are here.
_CONSTANT_OPCODES = frozenset(
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


class UnsupportedModuleError(Exception):
    """The module has something that this reader does not support (several devices, host transfers, unknown fields)."""


@dataclass(slots=True)
class Node:
    """One HLO instruction.

    Attributes:
        opcode: HLO opcode ("add", "dot", ...).
        shape: of its result (ShapeProto).
        rest: its other fields as encoded, without names, ids and metadata.
        operands: positions of the nodes it reads.
        called: positions of the computations it calls, in `Graph.called`.
    """

    opcode: str
    shape: bytes
    rest: bytes
    operands: tuple[int, ...]
    called: tuple[int, ...] = ()


@dataclass
class Computation:
    """An HLO computation.

    Attributes:
        nodes: in topological order, operands first.
        root: the position of the result.
        program_shape: the ProgramShapeProto.
        stateful: whether two calls with the same arguments may give different results.
    """

    nodes: list[Node]
    root: int
    program_shape: bytes
    stateful: bool = False


class Graph(Computation):
    """The entry computation of a module, with lists to look up users, operands and equal nodes.

    Nodes without users are dropped. With `merged`, equal nodes become one (common subexpression elimination).

    Attributes:
        called: the computations that nodes call, callees first; equal ones are merged.
        operands: per node, the positions of its operands.
        users: per node, the positions of the nodes that read it.
        kinds: per node, a number that is equal for nodes with the same opcode, fields and operand shapes.
        constant: per node, whether it is a small expression that depends on no parameter.
        inputs: positions of the parameters, by parameter number.
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
            # Parameters of one shape are of one kind, whatever their number.
            rest = b"" if node.opcode == "parameter" else node.rest
            reads = tuple(self.nodes[operand].shape for operand in node.operands)
            kind = (node.opcode, node.shape, rest, node.called, reads)
            self.kinds.append(kinds.setdefault(kind, len(kinds)))
            depth.append(1 + max((depth[operand] for operand in node.operands), default=0))
            self.constant.append(
                node.opcode in _CONSTANT_OPCODES
                and depth[-1] <= _DEEPEST_CONSTANT
                and all(self.constant[operand] for operand in node.operands)
            )


def parse(module: bytes, *, merged: bool = True) -> Graph:
    """Parses a module.

    Args:
        module: an encoded HloModuleProto.
        merged: whether equal nodes with equal operands become one.

    Raises:
        UnsupportedModuleError: the module has something that is not supported.
    """
    try:
        return _parse(module, merged)
    except (IndexError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnsupportedModuleError(f"the module is not written as expected ({error!r})") from error


def _parse(module: bytes, merged: bool) -> Graph:
    texts: list[bytes] = []
    entry = 0
    for number, value, _ in wire.fields(module):
        if number == MODULE_COMPUTATIONS:
            texts.append(value)
        elif number == MODULE_ENTRY:
            entry = value
        elif number not in (MODULE_NAME, MODULE_ENTRY_NAME, MODULE_PROGRAM_SHAPE, MODULE_ID) and value:
            raise UnsupportedModuleError(f"the module has a field {number}")
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
    raise UnsupportedModuleError("the module has no entry")


def _computation(text: bytes, places: dict[int, int]) -> tuple[int, Computation]:
    """The id and the content of an encoded HloComputationProto."""
    identity = root = 0
    shape = b""
    nodes: list[Node] = []
    positions: dict[int, int] = {}
    for number, value, _ in wire.fields(text):
        if number == INSTRUCTIONS:
            own, node = _node(value, positions, places)
            positions[own] = len(nodes)
            nodes.append(node)
        elif number == COMPUTATION_ID:
            identity = value
        elif number == ROOT:
            root = value
        elif number == PROGRAM_SHAPE:
            shape = value
    return identity, Computation(nodes, positions[root], shape)


def _node(text: bytes, positions: dict[int, int], places: dict[int, int]) -> tuple[int, Node]:
    identity = 0
    opcode, shape, rest = "", b"", []
    operands: list[int] = []
    called: list[int] = []
    for number, value, written in wire.fields(text):
        if number == ID:
            identity = value
        elif number == OPCODE:
            opcode = value.decode()
        elif number == SHAPE:
            shape = value
        elif number == OPERANDS:
            operands += wire.integers(value)
        elif number == CALLED:
            called += wire.integers(value)
        elif number == CONTROL_PREDECESSORS and value:
            raise UnsupportedModuleError("an instruction waits for another one")
        elif number not in (NAME, METADATA):
            rest.append(written)
    if opcode in _NOT_OF_ONE_DEVICE or is_dynamic(shape):
        raise UnsupportedModuleError(f"the module has a {opcode} of several devices, of the host, or of unknown size")
    node = Node(
        opcode,
        shape,
        b"".join(rest),
        tuple(positions[operand] for operand in operands),
        tuple(places[item] for item in called),
    )
    return identity, node


def _kept_nodes(entry: Computation, called: Sequence[Computation], merged: bool) -> tuple[list[Node], int]:
    """The nodes without unused ones (and, with `merged`, without duplicates), and the position of the root."""
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
                raise UnsupportedModuleError(f"a {node.opcode} has no result that is used, and may have an effect")
            continue
        operands = tuple(now[operand] for operand in node.operands)
        key = (node.opcode, node.shape, node.rest, operands, node.called)
        if stateful or not merged or key not in known:
            known[key] = len(kept)
            kept.append(Node(node.opcode, node.shape, node.rest, operands, node.called))
        now[position] = known[key]
    return kept, now[entry.root]


def _parameter_number(node: Node) -> int:
    return int(wire.first(wire.by_number(node.rest), PARAMETER_NUMBER))


def _is_stateful(node: Node, called: Sequence[Computation]) -> bool:
    return node.opcode in _STATEFUL or any(called[place].stateful for place in node.called)


# A single node (-1, position), or a group of nodes, named by the caller with two numbers that are not negative.
Item = tuple[int, int]


def ordered(graph: Graph, item_of: Sequence[Item]) -> tuple[list[Item], set[Item]]:
    """Sorts items topologically.

    Args:
        graph: the graph.
        item_of: per node, the item it belongs to.

    Returns:
        The items in order, and those that cannot be ordered: they are on a cycle, or on a path between two cycles.
    """
    needs: dict[Item, set[Item]] = {item: set() for item in item_of}
    users: dict[Item, set[Item]] = {item: set() for item in item_of}
    for place, operands in enumerate(graph.operands):
        item = item_of[place]
        for operand in operands:
            other = item_of[operand]
            if other != item:
                needs[item].add(other)
                users[other].add(item)
    order = _sorted_prefix(needs, users, set(needs))
    stuck = set(needs).difference(order)
    return order, stuck.difference(_sorted_prefix(users, needs, stuck))


def _sorted_prefix(needs: dict[Item, set[Item]], users: dict[Item, set[Item]], among: set[Item]) -> list[Item]:
    """The items of `among` that depend on no cycle, in topological order (Kahn's algorithm)."""
    missing = {item: len(needs[item] & among) for item in among}
    rank = {item: number for number, item in enumerate(needs)}
    ready = [(rank[item], item) for item, count in missing.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, item = heapq.heappop(ready)
        order.append(item)
        for user in users[item]:
            if user in missing:
                missing[user] -= 1
                if not missing[user]:
                    heapq.heappush(ready, (rank[user], user))
    return order
