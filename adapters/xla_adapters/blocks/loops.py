"""`find_loops`: which blocks are turns of a loop, and where each turn's inputs come from."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from xla_adapters.blocks.regions import Region
from xla_adapters.hlo_graph.graph import Graph
from xla_adapters.hlo_graph.order import Item, ordered

# A loop of fewer turns, or of smaller ones, gains nothing.
_FEWEST, _SMALLEST = 4, 24
# What is put together for a loop, or taken apart behind it, for each turn: at most one in so many instructions.
_INSTRUCTIONS_FOR_EACH = 4


@dataclass(frozen=True)
class Same:
    """The same value in every turn.

    Attributes:
        place: a node.
    """

    place: int


@dataclass(frozen=True)
class Carried:
    """What the turn before computed.

    Attributes:
        local: the place among an occurrence's nodes.
        first: the node that the first turn begins with.
    """

    local: int
    first: int


@dataclass(frozen=True)
class Given:
    """A value of each turn's own.

    Attributes:
        places: a node for each turn.
    """

    places: tuple[int, ...]


@dataclass(frozen=True)
class Made:
    """What another loop computed: in turn t, that of its turn `start + step * t`.

    Attributes:
        region: of the other loop.
        local: the place among its occurrences' nodes.
        begun: whether it is what the other's turn began with, which the one before that computed.
        start, step: see above; the step is 1 or -1.
    """

    region: int
    local: int
    begun: bool
    start: int
    step: int


Source = Same | Carried | Given | Made


@dataclass(frozen=True)
class Loop:
    """A region that is written as a loop.

    Attributes:
        turns: the region's occurrences, as they follow each other.
        sources: for each input of its block.
    """

    turns: tuple[int, ...]
    sources: tuple[Source, ...]

    def read(self) -> Iterable[int]:
        """The nodes that must be there before it."""
        for source in self.sources:
            if isinstance(source, Same):
                yield source.place
            elif isinstance(source, Carried):
                yield source.first
            elif isinstance(source, Given):
                yield from source.places


def find_loops(
    graph: Graph, regions: Sequence[Region], inputs: Sequence[Sequence[tuple[int, ...]]], order: Sequence[Item]
) -> tuple[dict[int, Loop], list[Item], set[int]]:
    """Loops, by the number of their region.

    Args:
        graph: of the nodes.
        regions: that are repeated.
        inputs: of each one's block: a node for each occurrence.
        order: nodes and occurrences (region, number), each behind what it reads.

    Returns:
        Them; the order in which each is one item (region, 0); and the nodes that are read, but for those only their own
        block or loop reads, or loops of each other.
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
    """Whether there is something to gain if it is a loop."""
    return len(region.occurrences) >= _FEWEST and len(region.occurrences[0]) >= _SMALLEST


def items(graph: Graph, regions: Sequence[Region], loops: Container[int]) -> list[Item]:
    """What each node is written with: (-1, itself), its occurrence (region, number), or its loop (region, 0)."""
    item_of: list[Item] = [(-1, place) for place in range(len(graph.nodes))]
    for number, region in enumerate(regions):
        for occurrence, places in enumerate(region.occurrences):
            for place in places:
                item_of[place] = (number, 0 if number in loops else occurrence)
    return item_of


def _wanted(
    graph: Graph, inputs: Sequence[Sequence[tuple[int, ...]]], loops: Mapping[int, Loop], order: Iterable[Item]
) -> set[int]:
    """The nodes that are read (see `find_loops`), by an order backwards."""
    wanted = {graph.root}
    for number, item in order:
        if number in loops:
            wanted.update(loops[number].read())
        elif number >= 0:
            wanted.update(places[item] for places in inputs[number])
        elif item in wanted or graph.nodes[item].opcode == "parameter":
            wanted.update(graph.operands[item])
    return wanted


class _Search:
    """Looks for loops among regions, some of which turn out not to be."""

    def __init__(
        self,
        regions: Sequence[Region],
        inputs: Sequence[Sequence[tuple[int, ...]]],
        order: Sequence[Item],
    ) -> None:
        self._regions = regions
        self._inputs = inputs
        self._turns: dict[int, list[int]] = {}
        for number, occurrence in order:
            if number >= 0:
                self._turns.setdefault(number, []).append(occurrence)
        self._candidates = {number for number, region in enumerate(regions) if is_large(region)}
        # The region, turn and place in it of a node.
        self._where = {
            place: (number, turn, local)
            for number in self._candidates
            for turn, occurrence in enumerate(self._turns[number])
            for local, place in enumerate(regions[number].occurrences[occurrence])
        }

    def leave_out(self, numbers: Iterable[int]) -> None:
        """These are no loops."""
        self._candidates.difference_update(numbers)

    def loops(self) -> tuple[dict[int, Loop], list[int]]:
        """All that are left, and those that turn out not to be one."""
        found: dict[int, Loop] = {}
        failed: list[int] = []
        for number in sorted(self._candidates):
            turns = self._turns[number]
            sources = [self._source(number, [places[turn] for turn in turns]) for places in self._inputs[number]]
            known = [source for source in sources if source is not None]
            if len(known) < len(sources):
                failed.append(number)
            else:
                found[number] = Loop(tuple(turns), tuple(known))
        return found, failed

    def smallest(self, numbers: Iterable[int]) -> list[int]:
        """The one with the fewest instructions."""
        return sorted(set(numbers), key=lambda number: (self._saved(number), number))[:1]

    def _saved(self, number: int) -> int:
        occurrences = self._regions[number].occurrences
        return (len(occurrences) - 1) * len(occurrences[0])

    def costly(self, loops: Mapping[int, Loop], wanted: set[int]) -> list[int]:
        """The smallest of those for which, in each turn, much is put together or taken apart."""

        def cost(number: int) -> int:
            occurrences = self._regions[number].occurrences
            given = sum(isinstance(source, Given) for source in loops[number].sources)
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
        """Where a value of each turn comes from; None if each is told by another turn, and not as a loop would be."""
        own = [self._where.get(place, (None, 0, 0))[0] == number for place in places]
        if not any(own):
            if len(set(places)) == 1:
                return Same(places[0])
            return self._made(places) or Given(tuple(places))
        return Carried(self._where[places[-1]][2], places[0]) if self._carried(number, places) else None

    def _made(self, places: Sequence[int]) -> Made | None:
        """By another loop, in its order or the other way round."""
        second, third = self._where.get(places[1]), self._where.get(places[2])
        if second is None or third is None or abs(third[1] - second[1]) != 1 or second[0] not in self._candidates:
            return None
        number, turn, local = second
        step = third[1] - turn
        start = turn - step
        begun = False
        for at, place in enumerate(places):
            turn = start + step * at
            if turn < 0:
                begun = True
                # There is one value before the first turn's.
                if turn < -1 or self._begins(number).get(local) != place:
                    return None
            elif self._where.get(place) != (number, turn, local):
                return None
        last = max(start, start + step * (len(places) - 1))
        if begun and last + 1 == len(self._turns[number]):
            return None
        return Made(number, local, begun, start + begun, step)

    def _begins(self, number: int) -> dict[int, int | None]:
        """What the first turn of a loop reads where others read what the turn before computed, by its place there.

        None if it reads different ones.
        """
        found: dict[int, int | None] = {}
        for item in self._inputs[number]:
            places = [item[turn] for turn in self._turns[number]]
            where = self._where.get(places[1], (None, 0, 0))
            if where[0] == number and self._carried(number, places):
                found[where[2]] = places[0] if found.get(where[2], places[0]) == places[0] else None
        return found

    def _carried(self, number: int, places: Sequence[int]) -> bool:
        """Whether the value is what the turn before computed, and the first one's comes from outside."""
        local = self._where[places[-1]][2] if places[-1] in self._where else None
        return self._where.get(places[0], (None, 0, 0))[0] != number and all(
            self._where.get(place) == (number, turn, local) for turn, place in enumerate(places[1:])
        )
