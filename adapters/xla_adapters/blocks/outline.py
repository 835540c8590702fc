"""`outline`: a module whose repeated blocks are computations that are called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xla_adapters.blocks.regions import TIMES, Region, find_regions
from xla_adapters.hlo_graph.graph import Graph, read
from xla_adapters.hlo_graph.order import Item, ordered
from xla_adapters.hlo_graph.shapes import byte_size, is_scalar, tuple_shape
from xla_adapters.hlo_graph.writing import Body, Numbers, copied_computations, program_shape, written_module

# Calls keep XLA from fusing across their edges; that is for what is mostly repeated.
_LEAST_SAVED = 0.5
# A block makes these itself of what they are made of, which is no larger.
_FREE = frozenset(("broadcast", "reshape", "transpose"))
# And these, if nothing but numbers is read beside.
_CHEAP = frozenset(
    {
        "abs",
        "add",
        "and",
        "bitcast-convert",
        "clamp",
        "compare",
        "convert",
        "divide",
        "maximum",
        "minimum",
        "multiply",
        "negate",
        "not",
        "or",
        "select",
        "shift-left",
        "shift-right-arithmetic",
        "shift-right-logical",
        "sign",
        "subtract",
        "xor",
    }
)
# As far up as this.
_DEEPEST = 8


@dataclass(frozen=True)
class Outlined:
    """A module whose repeated blocks are computations that are called.

    Attributes:
        module: an HloModuleProto.
        blocks: how often each block occurs, and how many instructions it has.
        instructions: of the whole graph, before.
    """

    module: bytes
    blocks: tuple[tuple[int, int], ...]
    instructions: int

    def __str__(self) -> str:
        calls = ", ".join(f"{times} times {size}" for times, size in self.blocks)
        return f"of {self.instructions} instructions these are blocks that are called: {calls}"


def outline(module: bytes) -> Outlined | None:
    """The same program, in which blocks that occur several times are calls of one computation each.

    Args:
        module: an HloModuleProto, of one device and not yet optimized.

    Returns:
        None if it would not be a good deal smaller, or if blocks convolve.

    Raises:
        NotUnderstood: the module holds something that is not known here.
    """
    graph = read(module)
    regions = find_regions(graph)
    order, stuck = _order(graph, regions)
    if stuck:
        # Parts keep clear of paths that leave them and come back in one occurrence; in another there may be one.
        regions = _without(regions, stuck)
        order, _ = _order(graph, regions)
    if any(graph.nodes[place].opcode == "convolution" for region in regions for place in region.occurrences[0]):
        # What it reads and writes is laid out in its own way, and would be copied at each edge.
        return None
    saved = sum((len(region.occurrences) - 1) * len(region.occurrences[0]) for region in regions)
    if saved < _LEAST_SAVED * len(graph.nodes):
        return None
    return Outlined(
        _Writer(graph, regions, order).module(),
        tuple((len(region.occurrences), len(region.occurrences[0])) for region in regions),
        len(graph.nodes),
    )


def _order(graph: Graph, regions: Sequence[Region]) -> tuple[list[Item], set[Item]]:
    """Nodes and occurrences (region, number), as `ordered`."""
    item_of: list[Item] = [(-1, place) for place in range(len(graph.nodes))]
    for number, region in enumerate(regions):
        for occurrence, places in enumerate(region.occurrences):
            for place in places:
                item_of[place] = (number, occurrence)
    return ordered(graph, item_of)


def _without(regions: Sequence[Region], left_out: set[Item]) -> list[Region]:
    """Without these occurrences, and without what is repeated too seldom then."""
    kept = [
        [places for occurrence, places in enumerate(region.occurrences) if (number, occurrence) not in left_out]
        for number, region in enumerate(regions)
    ]
    return [Region(occurrences) for occurrences in kept if len(occurrences) >= TIMES]


class _Block:
    """The computation of a region, while it is written.

    Attributes:
        inputs: what goes in: a node for each occurrence.
        outputs: what comes out: places among an occurrence's nodes.
    """

    def __init__(self, graph: Graph, region: Region, numbers: Numbers, called: Sequence[int]) -> None:
        self._graph = graph
        self._region = region
        self._first = region.occurrences[0]
        self._body = Body(graph.nodes, numbers, called)
        self._values: dict[tuple[int, ...], int] = {}
        self.inputs: list[tuple[int, ...]] = []
        self.outputs: list[int] = []
        inside = set(self._first)
        for local, place in enumerate(self._first):
            operands = [
                self._body.at[operand]
                if operand in inside
                else self._value(tuple(graph.operands[occurrence[local]][slot] for occurrence in region.occurrences))
                for slot, operand in enumerate(graph.operands[place])
            ]
            self._body.write(place, operands)

    def _value(self, places: tuple[int, ...], depth: int = 0) -> int:
        """The instruction that has the value of these nodes, one for each occurrence."""
        if places not in self._values:
            self._values[places] = self._made(places, depth)
        return self._values[places]

    def _made(self, places: tuple[int, ...], depth: int) -> int:
        graph, first = self._graph, places[0]
        node = graph.nodes[first]
        if graph.constant[first] and len(set(places)) == 1:
            return self._body.constant(first)
        if depth < _DEEPEST and all(graph.kinds[place] == graph.kinds[first] for place in places):
            reads = [tuple(graph.operands[place][slot] for place in places) for slot in range(len(node.operands))]
            wide = [other for other in reads if not self._is_scalar(other)]
            if node.opcode in _FREE or (
                node.opcode in _CHEAP
                and len(wide) <= 1
                and all(byte_size(graph.nodes[other[0]].shape) <= byte_size(node.shape) for other in wide)
            ):
                return self._body.again(first, [self._value(other, depth + 1) for other in reads])
        self.inputs.append(places)
        return self._body.parameter(len(self.inputs) - 1, node.shape)

    def _is_scalar(self, places: tuple[int, ...]) -> bool:
        """Whether the same number is everywhere in a value."""
        graph = self._graph
        while graph.nodes[places[0]].opcode in ("broadcast", "reshape"):
            if any(graph.kinds[place] != graph.kinds[places[0]] for place in places):
                return False
            places = tuple(graph.operands[place][0] for place in places)
        return all(graph.constant[place] for place in places) or is_scalar(graph.nodes[places[0]].shape)

    def computation(self, identity: int, wanted: set[int]) -> tuple[bytes, bytes]:
        """The computation, and the shape of its result.

        Args:
            identity: its number.
            wanted: nodes whose values others read.
        """
        nodes = self._graph.nodes
        self.outputs = [
            local
            for local in range(len(self._first))
            if any(occurrence[local] in wanted for occurrence in self._region.occurrences)
        ]
        left = [self._first[local] for local in self.outputs]
        result = tuple_shape([nodes[place].shape for place in left])
        root = self._body.together([self._body.at[place] for place in left], result)
        program = program_shape([nodes[places[0]].shape for places in self.inputs], result)
        return self._body.computation(f"block.{identity}", identity, root, program), result


class _Writer:
    """Writes a graph with calls in place of what is repeated."""

    def __init__(self, graph: Graph, regions: Sequence[Region], order: Sequence[Item]) -> None:
        self._graph = graph
        self._regions = regions
        self._order = order
        self._numbers = Numbers()
        self._computations: list[bytes] = []

    def module(self) -> bytes:
        """The HloModuleProto."""
        texts, called = copied_computations(self._graph.called, self._numbers)
        self._computations += texts
        blocks = [_Block(self._graph, region, self._numbers, called) for region in self._regions]
        wanted = self._wanted(blocks)
        targets = []
        for block in blocks:
            identity = self._numbers.next()
            text, result = block.computation(identity, wanted)
            self._computations.append(text)
            targets.append((identity, result))
        entry = self._entry(called, blocks, targets, wanted)
        identity = self._numbers.next()
        name = f"step.{identity}"
        shape = self._graph.program_shape
        self._computations.append(entry.computation(name, identity, entry.at[self._graph.root], shape))
        return written_module(self._computations, name, identity, shape)

    def _wanted(self, blocks: Sequence[_Block]) -> set[int]:
        """The nodes whose values are read outside the occurrence they are in; and of the others those that are used."""
        graph = self._graph
        wanted = {graph.root}
        for number, item in reversed(self._order):
            if number >= 0:
                wanted.update(places[item] for places in blocks[number].inputs)
            elif item in wanted or graph.nodes[item].opcode == "parameter":
                wanted.update(graph.operands[item])
        return wanted

    def _entry(
        self, called: Sequence[int], blocks: Sequence[_Block], targets: Sequence[tuple[int, bytes]], wanted: set[int]
    ) -> Body:
        nodes = self._graph.nodes
        entry = Body(nodes, self._numbers, called)
        for number, item in self._order:
            if number >= 0:
                block, occurrence = blocks[number], self._regions[number].occurrences[item]
                call = entry.call(targets[number], [entry.at[places[item]] for places in block.inputs])
                for index, local in enumerate(block.outputs):
                    place = occurrence[local]
                    entry.at[place] = entry.element(call, index, nodes[place].shape)
            elif item in wanted or nodes[item].opcode == "parameter":
                entry.copy(item)
        return entry
