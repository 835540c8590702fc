"""`OutlinedFunction`: writes a region as a computation."""

from __future__ import annotations

from collections.abc import Sequence

from xla_adapters.cpu.graph_passes.outlining.regions import Region
from xla_adapters.hlo.builder import ComputationBuilder, IdCounter, program_shape
from xla_adapters.hlo.graph import Graph
from xla_adapters.hlo.wire import byte_size, is_scalar, tuple_shape

# The function recomputes these inputs from their operands, which are not larger, instead of taking them as arguments.
_FREE = frozenset(("broadcast", "reshape", "transpose"))
# These too, if all other operands are scalars.
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
# The longest chain of recomputed inputs.
_DEEPEST = 8


class OutlinedFunction:
    """The computation that stands for each occurrence of a region.

    Args:
        graph: the graph.
        region: the repeated subgraph.
        numbers: gives out ids.
        called: ids of the computations that nodes call.

    Attributes:
        inputs: per parameter, the node that each occurrence passes.
    """

    def __init__(self, graph: Graph, region: Region, numbers: IdCounter, called: Sequence[int]) -> None:
        self._graph = graph
        self._region = region
        self._first = region.occurrences[0]
        self._body = ComputationBuilder(graph.nodes, numbers, called)
        self._values: dict[tuple[int, ...], int] = {}
        self.inputs: list[tuple[int, ...]] = []
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
        """The id of the instruction that has the value of these nodes (one per occurrence)."""
        if places not in self._values:
            self._values[places] = self._made(places, depth)
        return self._values[places]

    def _made(self, places: tuple[int, ...], depth: int) -> int:
        graph, first = self._graph, places[0]
        node = graph.nodes[first]
        if graph.constant[first] and len(set(places)) == 1:
            return self._body.constant(first)
        is_one_number = len(set(places)) == 1 and is_scalar(node.shape)
        if not is_one_number and depth < _DEEPEST and all(graph.kinds[place] == graph.kinds[first] for place in places):
            reads = [tuple(graph.operands[place][slot] for place in places) for slot in range(len(node.operands))]
            wide = [other for other in reads if not self._is_scalar(other)]
            if node.opcode in _FREE or (
                node.opcode in _CHEAP
                and len(wide) <= 1
                and all(byte_size(graph.nodes[other[0]].shape) <= byte_size(node.shape) for other in wide)
            ):
                return self._body.emit(first, [self._value(other, depth + 1) for other in reads])
        self.inputs.append(places)
        return self._body.parameter(len(self.inputs) - 1, node.shape)

    def _is_scalar(self, places: tuple[int, ...]) -> bool:
        """Whether all elements of the value are equal (a scalar, a constant, or a broadcast of one)."""
        graph = self._graph
        while graph.nodes[places[0]].opcode in ("broadcast", "reshape"):
            if any(graph.kinds[place] != graph.kinds[places[0]] for place in places):
                return False
            places = tuple(graph.operands[place][0] for place in places)
        return all(graph.constant[place] for place in places) or is_scalar(graph.nodes[places[0]].shape)

    def used_results(self, wanted: set[int]) -> list[int]:
        """Positions (among an occurrence's nodes) of the results that are used outside.

        Args:
            wanted: nodes that are read from outside.
        """
        return [
            local
            for local in range(len(self._first))
            if any(occurrence[local] in wanted for occurrence in self._region.occurrences)
        ]

    def computation(self, identity: int, outputs: Sequence[int]) -> tuple[bytes, bytes]:
        """The encoded HloComputationProto, and the shape of its result (a tuple).

        Args:
            identity: id of the computation.
            outputs: positions of the results among an occurrence's nodes.
        """
        nodes = self._graph.nodes
        left = [self._first[local] for local in outputs]
        result = tuple_shape([nodes[place].shape for place in left])
        root = self._body.make_tuple([self._body.at[place] for place in left], result)
        program = program_shape([nodes[places[0]].shape for places in self.inputs], result)
        return self._body.computation(f"outlined.{identity}", identity, root, program), result
