"""`find_loops`: finds the regions whose occurrences can be iterations of a loop, and where their inputs come from."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from xla_adapters.cpu.graph_passes.outlining.regions import Region
from xla_adapters.hlo.graph import Graph, Item, ordered

# The fewest iterations, and the fewest instructions of each, that are worth a loop.
_FEWEST, _SMALLEST = 4, 24
# A loop must have at least this many instructions per input that is stacked, or result that is sliced, per iteration.
_INSTRUCTIONS_FOR_EACH = 4


@dataclass(frozen=True)
class Invariant:
    """A loop-invariant input: the same value in every iteration.

    Attributes:
        place: the node.
    """

    place: int


@dataclass(frozen=True)
class Carried:
    """A loop-carried input: a result of the previous iteration.

    Attributes:
        local: position of the result among an occurrence's nodes.
        first: the node that is the initial value.
    """

    local: int
    first: int


@dataclass(frozen=True)
class PerIteration:
    """An input that is another node in each iteration (the weights of a layer, say); the nodes are stacked.

    Attributes:
        places: the node of each iteration.
    """

    places: tuple[int, ...]


@dataclass(frozen=True)
class FromLoop:
    """A result of another loop: iteration t reads that of the other loop's iteration `start + step * t`.

    A backward loop reads the activations of the forward loop in reverse order, for example.

    Attributes:
        region: number of the other loop's region.
        local: position of the result among its occurrence's nodes.
        begun: whether it is the loop-carried input of that iteration instead of its result.
        start, step: see above; the step is 1 or -1.
    """

    region: int
    local: int
    begun: bool
    start: int
    step: int


Source = Invariant | Carried | PerIteration | FromLoop


@dataclass(frozen=True)
class Loop:
    """A region that can be written as a loop.

    Attributes:
        iterations: the region's occurrences in execution order.
        sources: where each input of its function comes from.
    """

    iterations: tuple[int, ...]
    sources: tuple[Source, ...]

    def operands(self) -> Iterable[int]:
        """The nodes that must be computed before the loop."""
        for source in self.sources:
            if isinstance(source, Invariant):
                yield source.place
            elif isinstance(source, Carried):
                yield source.first
            elif isinstance(source, PerIteration):
                yield from source.places


def find_loops(
    graph: Graph, regions: Sequence[Region], inputs: Sequence[Sequence[tuple[int, ...]]], order: Sequence[Item]
) -> tuple[dict[int, Loop], list[Item], set[int]]:
    """Finds loops; candidates are dropped until the rest can be ordered and is worth it.

    Args:
        graph: the graph.
        regions: the repeated subgraphs.
        inputs: per region, the inputs of its function: a node for each occurrence.
        order: nodes and occurrences (region, number) in topological order.

    Returns:
        The loops by number of the region; the order, in which a loop is the item (region, 0); and the nodes that must
        be available outside of functions and loops.
    """
    search = _Search(regions, inputs, order)
    while True:
        loops, failed = search.loops()
        now = list(order)
        if not failed and loops:
            now, stuck = ordered(graph, items(graph, regions, loops))
            failed = search.smallest(number for number, _ in stuck if number in loops)
        if not failed:
            wanted = _wanted(graph, inputs, loops, reversed(now))
            failed = search.costly(loops, wanted)
            if not failed:
                return loops, now, wanted
        search.leave_out(failed)


def is_large(region: Region) -> bool:
    """Whether a region is large enough for a loop."""
    return len(region.occurrences) >= _FEWEST and len(region.occurrences[0]) >= _SMALLEST


def items(graph: Graph, regions: Sequence[Region], loops: Container[int]) -> list[Item]:
    """Per node, the item it is written in: (-1, itself), its occurrence (region, number), or its loop (region, 0)."""
    item_of: list[Item] = [(-1, place) for place in range(len(graph.nodes))]
    for number, region in enumerate(regions):
        for occurrence, places in enumerate(region.occurrences):
            for place in places:
                item_of[place] = (number, 0 if number in loops else occurrence)
    return item_of


def _wanted(
    graph: Graph, inputs: Sequence[Sequence[tuple[int, ...]]], loops: Mapping[int, Loop], order: Iterable[Item]
) -> set[int]:
    """The nodes that are read outside (see `find_loops`); `order` is reversed."""
    wanted = {graph.root}
    for number, item in order:
        if number in loops:
            wanted.update(loops[number].operands())
        elif number >= 0:
            wanted.update(places[item] for places in inputs[number])
        elif item in wanted or graph.nodes[item].opcode == "parameter":
            wanted.update(graph.operands[item])
    return wanted


class _Search:
    """The candidates for loops; those that turn out not to be one are removed."""

    def __init__(
        self,
        regions: Sequence[Region],
        inputs: Sequence[Sequence[tuple[int, ...]]],
        order: Sequence[Item],
    ) -> None:
        self._regions = regions
        self._inputs = inputs
        self._iterations: dict[int, list[int]] = {}
        for number, occurrence in order:
            if number >= 0:
                self._iterations.setdefault(number, []).append(occurrence)
        self._candidates = {number for number, region in enumerate(regions) if is_large(region)}
        # Per node: its region, its iteration, and its position in that.
        self._where = {
            place: (number, iteration, local)
            for number in self._candidates
            for iteration, occurrence in enumerate(self._iterations[number])
            for local, place in enumerate(regions[number].occurrences[occurrence])
        }

    def leave_out(self, numbers: Iterable[int]) -> None:
        """Removes candidates."""
        self._candidates.difference_update(numbers)

    def loops(self) -> tuple[dict[int, Loop], list[int]]:
        """The remaining candidates as loops, and the candidates with an input that no loop can provide."""
        found: dict[int, Loop] = {}
        failed: list[int] = []
        for number in sorted(self._candidates):
            iterations = self._iterations[number]
            sources = [
                self._source(number, [places[iteration] for iteration in iterations]) for places in self._inputs[number]
            ]
            known = [source for source in sources if source is not None]
            if len(known) < len(sources):
                failed.append(number)
            else:
                found[number] = Loop(tuple(iterations), tuple(known))
        return found, failed

    def smallest(self, numbers: Iterable[int]) -> list[int]:
        """The one that saves the fewest instructions, as a list; empty if there is none."""
        return sorted(set(numbers), key=lambda number: (self._saved(number), number))[:1]

    def _saved(self, number: int) -> int:
        occurrences = self._regions[number].occurrences
        return (len(occurrences) - 1) * len(occurrences[0])

    def costly(self, loops: Mapping[int, Loop], wanted: set[int]) -> list[int]:
        """The smallest loop that stacks or slices too much per iteration, as a list; empty if there is none."""

        def cost(number: int) -> int:
            occurrences = self._regions[number].occurrences
            given = sum(isinstance(source, PerIteration) for source in loops[number].sources)
            return given + sum(
                any(occurrence[local] in wanted for occurrence in occurrences[:-1])
                for local in range(len(occurrences[0]))
            )

        too_much = [
            number
            for number in loops
            if cost(number) * _INSTRUCTIONS_FOR_EACH > len(self._regions[number].occurrences[0])
        ]
        return self.smallest(too_much)

    def _source(self, number: int, places: Sequence[int]) -> Source | None:
        """Where an input comes from; None if other iterations compute it in a way that is not loop-carried."""
        own = [self._where.get(place, (None, 0, 0))[0] == number for place in places]
        if not any(own):
            if len(set(places)) == 1:
                return Invariant(places[0])
            return self._made(places) or PerIteration(tuple(places))
        return Carried(self._where[places[-1]][2], places[0]) if self._carried(number, places) else None

    def _made(self, places: Sequence[int]) -> FromLoop | None:
        """The input as results of another loop, in its order or reversed; None if it is not that."""
        second, third = self._where.get(places[1]), self._where.get(places[2])
        if second is None or third is None or abs(third[1] - second[1]) != 1 or second[0] not in self._candidates:
            return None
        number, iteration, local = second
        step = third[1] - iteration
        start = iteration - step
        begun = False
        for at, place in enumerate(places):
            iteration = start + step * at
            if iteration < 0:
                begun = True
                # Iteration -1 is the initial value of the loop-carried input.
                if iteration < -1 or self._begins(number).get(local) != place:
                    return None
            elif self._where.get(place) != (number, iteration, local):
                return None
        last = max(start, start + step * (len(places) - 1))
        if begun and last + 1 == len(self._iterations[number]):
            return None
        return FromLoop(number, local, begun, start + begun, step)

    def _begins(self, number: int) -> dict[int, int | None]:
        """Initial values of a loop's carried inputs, by position of the result; None if one has several."""
        found: dict[int, int | None] = {}
        for item in self._inputs[number]:
            places = [item[iteration] for iteration in self._iterations[number]]
            where = self._where.get(places[1], (None, 0, 0))
            if where[0] == number and self._carried(number, places):
                found[where[2]] = places[0] if found.get(where[2], places[0]) == places[0] else None
        return found

    def _carried(self, number: int, places: Sequence[int]) -> bool:
        """Whether an input is a result of the previous iteration, with an initial value from outside."""
        local = self._where[places[-1]][2] if places[-1] in self._where else None
        return self._where.get(places[0], (None, 0, 0))[0] != number and all(
            self._where.get(place) == (number, iteration, local) for iteration, place in enumerate(places[1:])
        )
