"""`outline`: a module whose repeated blocks are computations that are called, or turns of loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xla_adapters.blocks.block import Block
from xla_adapters.blocks.joined import join
from xla_adapters.blocks.loops import Given, find_loops, is_large, items
from xla_adapters.blocks.peeled import peel
from xla_adapters.blocks.regions import TIMES, Region, find_regions
from xla_adapters.blocks.rolled import LoopWriter
from xla_adapters.hlo_graph.graph import Graph, read
from xla_adapters.hlo_graph.order import Item, ordered
from xla_adapters.hlo_graph.writing import Body, Numbers, copied_computations, written_module

# Calls keep XLA from fusing across their edges; that is for what is mostly repeated.
_LEAST_SAVED = 0.5


@dataclass(frozen=True)
class Outlined:
    """A module whose repeated blocks are computations that are called, or turns of loops.

    Attributes:
        module: an HloModuleProto.
        blocks: how often each block occurs, and how many instructions it has.
        instructions: of the whole graph, before.
        loops: those of the blocks that are turns of a loop.
    """

    module: bytes
    blocks: tuple[tuple[int, int], ...]
    instructions: int
    loops: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        found = f"of {self.instructions} instructions these are blocks that are called: {_times(self.blocks)}"
        return f"{found}; of these loops: {_times(self.loops)}" if self.loops else found


def outline(module: bytes) -> Outlined | None:
    """The same program, in which blocks that occur several times are calls of one computation each, or turns of a loop.

    Args:
        module: an HloModuleProto, of one device and not yet optimized.

    Returns:
        None if it would not be a good deal smaller, or if blocks convolve.

    Raises:
        NotUnderstood: the module holds something that is not known here.
    """
    graph = read(module)
    regions = find_regions(graph)
    _, stuck = ordered(graph, items(graph, regions, ()))
    if stuck:
        # Parts keep clear of paths that leave them and come back in one occurrence; in another there may be one.
        regions = _without(regions, stuck)
    regions = join(graph, regions)
    if any(graph.nodes[place].opcode == "convolution" for region in regions for place in region.occurrences[0]):
        # What it reads and writes is laid out in its own way, and would be copied at each edge.
        return None
    saved = sum((len(region.occurrences) - 1) * len(region.occurrences[0]) for region in regions)
    if saved < _LEAST_SAVED * len(graph.nodes):
        return None
    writer = _Writer(graph, regions)
    if any(is_large(region) and number not in writer.loops for number, region in enumerate(regions)):
        peeled = [_Writer(graph, arrangement) for arrangement in peel(graph, regions)]
        writer = max([writer, *peeled], key=_Writer.gain)
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
    """Without these occurrences, and without what is repeated too seldom then."""
    kept = [
        [places for occurrence, places in enumerate(region.occurrences) if (number, occurrence) not in left_out]
        for number, region in enumerate(regions)
    ]
    return [Region(occurrences) for occurrences in kept if len(occurrences) >= TIMES]


class _Writer:
    """Writes a graph with calls and loops in place of what is repeated."""

    def __init__(self, graph: Graph, regions: Sequence[Region]) -> None:
        self._graph = graph
        self.regions = regions
        self._numbers = Numbers()
        self._computations, self._called = copied_computations(graph.called, self._numbers)
        self._blocks = [Block(graph, region, self._numbers, self._called) for region in regions]
        inputs = [block.inputs for block in self._blocks]
        order, _ = ordered(graph, items(graph, regions, ()))
        self.loops, self._order, self._wanted = find_loops(graph, regions, inputs, order)

    def gain(self) -> tuple[int, int]:
        """By how many instructions there are fewer with loops; the less is put together for it, the better."""
        sizes = {
            number: (len(loop.turns), len(self.regions[number].occurrences[0])) for number, loop in self.loops.items()
        }
        given = sum(isinstance(source, Given) for loop in self.loops.values() for source in loop.sources)
        return sum((turns - 1) * size for turns, size in sizes.values()), -given

    def module(self) -> bytes:
        """The HloModuleProto."""
        entry = self._entry()
        identity = self._numbers.next()
        name = f"step.{identity}"
        shape = self._graph.program_shape
        self._computations.append(entry.computation(name, identity, entry.at[self._graph.root], shape))
        return written_module(self._computations, name, identity, shape)

    def _entry(self) -> Body:
        nodes, wanted = self._graph.nodes, self._wanted
        entry = Body(nodes, self._numbers, self._called)
        writer = LoopWriter(self._graph, self.regions, self._blocks, self.loops, self._numbers)
        calls: dict[int, tuple[list[int], tuple[int, bytes]]] = {}
        for number, item in self._order:
            if number in self.loops:
                writer.write(entry, number, wanted)
            elif number >= 0:
                block, occurrence = self._blocks[number], self.regions[number].occurrences[item]
                if number not in calls:
                    identity, outputs = self._numbers.next(), block.read(wanted)
                    text, result = block.computation(identity, outputs)
                    self._computations.append(text)
                    calls[number] = outputs, (identity, result)
                outputs, target = calls[number]
                call = entry.call(target, [entry.at[places[item]] for places in block.inputs])
                for index, local in enumerate(outputs):
                    place = occurrence[local]
                    entry.at[place] = entry.element(call, index, nodes[place].shape)
            elif item in wanted or nodes[item].opcode == "parameter":
                entry.copy(item)
        self._computations += writer.computations
        return entry
