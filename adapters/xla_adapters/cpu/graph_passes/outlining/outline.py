"""`outline`: rewrites a module so that repeated subgraphs are called functions or loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xla_adapters.cpu.graph_passes.outlining.loop_writer import LoopWriter
from xla_adapters.cpu.graph_passes.outlining.loops import PerIteration, find_loops, is_large, items
from xla_adapters.cpu.graph_passes.outlining.merging import merge
from xla_adapters.cpu.graph_passes.outlining.outlined_function import OutlinedFunction
from xla_adapters.cpu.graph_passes.outlining.peeling import peel
from xla_adapters.cpu.graph_passes.outlining.regions import TIMES, Region, find_regions
from xla_adapters.hlo.builder import ComputationBuilder, IdCounter, copied_computations, written_module
from xla_adapters.hlo.graph import Graph, Item, ordered, parse

# XLA does not fuse across calls, so outlining must remove at least this share of the instructions.
_LEAST_SAVED = 0.5


@dataclass(frozen=True)
class Outlined:
    """The result of `outline`.

    Attributes:
        module: the new module (HloModuleProto).
        functions: per outlined function, how often it occurs and how many instructions it has.
        instructions: number of instructions of the entry computation before.
        loops: the subset of `functions` that became bodies of loops.
    """

    module: bytes
    functions: tuple[tuple[int, int], ...]
    instructions: int
    loops: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        found = f"{self.instructions} instructions; outlined functions: {_times(self.functions)}"
        return f"{found}; of these loops: {_times(self.loops)}" if self.loops else found


def outline(module: bytes) -> Outlined | None:
    """Rewrites a module so that each repeated subgraph is one computation, called several times or run in a loop.

    Args:
        module: an HloModuleProto for one device, before XLA's optimizations.

    Returns:
        None if fewer than half of the instructions would go, or if a repeated subgraph has a convolution.

    Raises:
        UnsupportedModuleError: the module has something that the reader does not support.
    """
    graph = parse(module)
    regions = find_regions(graph)
    _, stuck = ordered(graph, items(graph, regions, ()))
    if stuck:
        # The search checks one occurrence for paths that leave it and come back; others may have such a path.
        regions = _without(regions, stuck)
    regions = merge(graph, regions)
    if any(graph.nodes[place].opcode == "convolution" for region in regions for place in region.occurrences[0]):
        # XLA lays out operands of convolutions differently, so they would be copied at each call.
        return None
    saved = sum((len(region.occurrences) - 1) * len(region.occurrences[0]) for region in regions)
    if saved < _LEAST_SAVED * len(graph.nodes):
        return None
    writer = _Writer(graph, regions)
    if any(is_large(region) and number not in writer.loops for number, region in enumerate(regions)):
        shortened = [_Writer(graph, arrangement) for arrangement in peel(graph, regions)]
        writer = max([writer, *shortened], key=_Writer.gain)
    sizes = [(len(region.occurrences), len(region.occurrences[0])) for region in writer.regions]
    return Outlined(
        writer.module(),
        tuple(sizes),
        len(graph.nodes),
        tuple(size for number, size in enumerate(sizes) if number in writer.loops),
    )


def _times(sizes: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{times} times {size}" for times, size in sizes)


def _without(regions: Sequence[Region], left_out: set[Item]) -> list[Region]:
    """The regions without these occurrences; regions with fewer than `TIMES` occurrences left are dropped."""
    kept = [
        [places for occurrence, places in enumerate(region.occurrences) if (number, occurrence) not in left_out]
        for number, region in enumerate(regions)
    ]
    return [Region(occurrences) for occurrences in kept if len(occurrences) >= TIMES]


class _Writer:
    """Writes a graph as a module in which each occurrence of a region is a call, or an iteration of a loop.

    Attributes:
        regions: the repeated subgraphs.
        loops: by number of the region, those that are loops.
    """

    def __init__(self, graph: Graph, regions: Sequence[Region]) -> None:
        self._graph = graph
        self.regions = regions
        self._numbers = IdCounter()
        self._computations, self._called = copied_computations(graph.called, self._numbers)
        self._functions = [OutlinedFunction(graph, region, self._numbers, self._called) for region in regions]
        inputs = [function.inputs for function in self._functions]
        order, _ = ordered(graph, items(graph, regions, ()))
        self.loops, self._order, self._wanted = find_loops(graph, regions, inputs, order)

    def gain(self) -> tuple[int, int]:
        """Sort key to compare arrangements: instructions saved by loops, then minus the number of stacked inputs."""
        sizes = {
            number: (len(loop.iterations), len(self.regions[number].occurrences[0]))
            for number, loop in self.loops.items()
        }
        given = sum(isinstance(source, PerIteration) for loop in self.loops.values() for source in loop.sources)
        return sum((iterations - 1) * size for iterations, size in sizes.values()), -given

    def module(self) -> bytes:
        """The encoded HloModuleProto; to be called once."""
        entry = self._entry()
        identity = self._numbers.next()
        name = f"step.{identity}"
        shape = self._graph.program_shape
        self._computations.append(entry.computation(name, identity, entry.at[self._graph.root], shape))
        return written_module(self._computations, name, identity, shape)

    def _entry(self) -> ComputationBuilder:
        nodes, wanted = self._graph.nodes, self._wanted
        entry = ComputationBuilder(nodes, self._numbers, self._called)
        writer = LoopWriter(self._graph, self.regions, self._functions, self.loops, self._numbers)
        calls: dict[int, tuple[list[int], tuple[int, bytes]]] = {}
        for number, item in self._order:
            if number in self.loops:
                writer.write(entry, number, wanted)
            elif number >= 0:
                function, occurrence = self._functions[number], self.regions[number].occurrences[item]
                if number not in calls:
                    identity, outputs = self._numbers.next(), function.used_results(wanted)
                    text, result = function.computation(identity, outputs)
                    self._computations.append(text)
                    calls[number] = outputs, (identity, result)
                outputs, target = calls[number]
                call = entry.call(target, [entry.at[places[item]] for places in function.inputs])
                for index, local in enumerate(outputs):
                    place = occurrence[local]
                    entry.at[place] = entry.tuple_element(call, index, nodes[place].shape)
            elif item in wanted or nodes[item].opcode == "parameter":
                entry.copy(item)
        self._computations += writer.computations
        return entry
