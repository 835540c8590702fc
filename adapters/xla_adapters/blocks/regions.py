"""`find_regions`: parts of a graph that occur several times.

A part grows from one node that is alike in several places, in all of them at once, along operands and users, as long as
it stays the same everywhere and no path leaves it and comes back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from xla_adapters.hlo_graph.graph import Graph

# Parts grow from these first: there is one of each in what people call a layer.
_ANCHORS = ("dot", "convolution", "reduce", "batch-norm-training", "batch-norm-grad")
# A part that occurs less often, or is smaller, gains nothing.
TIMES, _SIZE = 3, 6
# What may be walked over in the search, in all, for each node of the graph; what was found till then is kept.
_EFFORT = 200
# Nodes that are read more often are no way to something that corresponds.
_MANY = 64
# How far around two nodes everything is alike where parts begin to grow: farther, the first and last layers differ.
_ROUNDS = 2
# What a part keeps inside, even if only others use it.
_COSTLY = frozenset(
    {
        "batch-norm-grad",
        "batch-norm-training",
        "call",
        "cholesky",
        "conditional",
        "convolution",
        "custom-call",
        "dot",
        "fft",
        "gather",
        "get-tuple-element",
        "reduce",
        "reduce-window",
        "rng",
        "rng-bit-generator",
        "scatter",
        "select-and-scatter",
        "sort",
        "triangular-solve",
        "while",
    }
)


@dataclass(frozen=True)
class Region:
    """A part that occurs several times.

    Attributes:
        occurrences: the nodes of each, those that correspond at the same place, each behind its operands.
    """

    occurrences: list[list[int]]


def find_regions(graph: Graph) -> list[Region]:
    """Parts that occur several times, none of which overlap."""
    colours = _colours(graph)
    owned: set[int] = set()
    found: list[Region] = []
    effort = _EFFORT * len(graph.nodes)
    for places in _alike(graph, colours):
        free = [place for place in places if place not in owned]
        if len(free) < TIMES:
            continue
        growth = _Growth(graph, colours, owned, [[place] for place in free])
        growth.grow(effort)
        effort -= growth.walked
        if effort < 0:
            break
        growth.trim()
        if len(growth.members[0]) < _SIZE:
            continue
        found.append(Region(growth.ordered()))
        owned.update(place for occurrence in growth.members for place in occurrence)
    return found


def grown(graph: Graph, region: Region, others: Iterable[Region]) -> Region:
    """What a part grows to that has less to be like than when it was found.

    Args:
        graph: of the nodes.
        region: some occurrences of a part.
        others: what belongs to these stays theirs.
    """
    taken = {place for other in others for occurrence in other.occurrences for place in occurrence}
    more = _Growth(graph, _colours(graph), taken, region.occurrences)
    more.grow(_EFFORT * len(graph.nodes))
    more.trim()
    return Region(more.ordered())


def _colours(graph: Graph) -> list[int]:
    """Equal for nodes whose surroundings are alike."""
    colours = list(graph.kinds)
    for _ in range(_ROUNDS):
        names: dict[object, int] = {}
        colours = [
            names.setdefault(
                (
                    colours[place],
                    tuple(colours[operand] for operand in node.operands),
                    tuple(sorted(colours[user] for user in graph.users[place][:8])),
                ),
                len(names),
            )
            for place, node in enumerate(graph.nodes)
        ]
    return colours


def _alike(graph: Graph, colours: Sequence[int]) -> list[list[int]]:
    """Nodes that are alike, where parts are to grow from first."""
    classes: dict[int, list[int]] = {}
    for place, node in enumerate(graph.nodes):
        if not graph.constant[place] and node.opcode != "parameter":
            classes.setdefault(colours[place], []).append(place)
    many = [places for places in classes.values() if len(places) >= TIMES]
    rank = {opcode: number for number, opcode in enumerate(_ANCHORS)}
    # As often as most are there is a layer; what is there more often is in a layer several times, and would cut it up.
    common = Counter(len(places) for places in many)

    def order(places: list[int]) -> tuple[int, int, int, list[int]]:
        return rank.get(graph.nodes[places[0]].opcode, len(rank)), -common[len(places)], -len(places), places

    return sorted(many, key=order)


class _Growth:
    """Grows a part.

    Args:
        graph: of the nodes.
        colours: see `_colours`.
        taken: nodes that are others'.
        members: the nodes of each occurrence to begin with.

    Attributes:
        members: the nodes of each occurrence.
        walked: over how many nodes, to see what depends on what.
    """

    def __init__(self, graph: Graph, colours: Sequence[int], taken: set[int], members: Sequence[Sequence[int]]) -> None:
        self._graph = graph
        self._colours = colours
        self._taken = taken
        self.members: list[list[int]] = [[] for _ in members]
        # The room for the marks, too.
        self.walked = len(graph.nodes) // 8
        # The occurrence of a node, and its place in it.
        self._where: dict[int, tuple[int, int]] = {}
        self._pattern = len(members) // 2
        # What is computed from the pattern's nodes, and what they are computed from.
        self._below = bytearray(len(graph.nodes))
        self._above = bytearray(len(graph.nodes))
        self._queue: list[int] = []
        for alike in zip(*members, strict=True):
            self._add(alike)

    def grow(self, effort: int) -> None:
        """To the end, or until it has walked over more than this."""
        at = 0
        while at < len(self._queue) and self.walked <= effort:
            local = self._queue[at]
            at += 1
            self._try_operands(local)
            self._try_users(local)

    def trim(self) -> None:
        """Leaves out what need not be inside.

        What is computed for nobody inside need not come out, if what it is computed from does. And of several values in
        one, elements are handed over, not the whole.
        """
        graph, pattern = self._graph, self.members[self._pattern]
        inside = set(range(len(pattern)))
        for local in sorted(inside, key=pattern.__getitem__, reverse=True):
            node = graph.nodes[pattern[local]]
            if node.opcode == "get-tuple-element":
                leaves = node.operands[0] not in self._where
            elif node.opcode in _COSTLY:
                leaves = False
            else:
                used = [user for occurrence in self.members for user in graph.users[occurrence[local]]]
                leaves = not any(user in self._where or user == graph.root for user in used)
            if leaves:
                inside.remove(local)
                for occurrence in self.members:
                    del self._where[occurrence[local]]
        self.members = [[places[local] for local in sorted(inside)] for places in self.members]

    def ordered(self) -> list[list[int]]:
        """The members, each behind its operands."""
        pattern = self.members[self._pattern]
        order = sorted(range(len(pattern)), key=pattern.__getitem__)
        return [[occurrence[local] for local in order] for occurrence in self.members]

    def _try_operands(self, local: int) -> None:
        nodes = self._graph.nodes
        for slot in range(len(nodes[self.members[self._pattern][local]].operands)):
            candidate = [nodes[occurrence[local]].operands[slot] for occurrence in self.members]
            if self._fits(candidate):
                self._add(candidate)

    def _try_users(self, local: int) -> None:
        users = self._graph.users
        pattern = self.members[self._pattern][local]
        if len(users[pattern]) > _MANY:
            return
        for user in users[pattern]:
            if user in self._where or user in self._taken or user == self._graph.root:
                continue
            candidate = []
            for occurrence in self.members:
                match = self._match(user, pattern, occurrence[local])
                if match is None:
                    break
                candidate.append(match)
            else:
                if self._fits(candidate):
                    self._add(candidate)

    def _match(self, user: int, of: int, other: int) -> int | None:
        """The user of another node that corresponds to a user of the pattern's."""
        if of == other:
            return user
        graph = self._graph
        if len(graph.users[other]) > _MANY:
            return None
        self.walked += len(graph.users[other])
        kind, slots = graph.kinds[user], _slots(graph, user, of)
        found = [
            item for item in graph.users[other] if graph.kinds[item] == kind and _slots(graph, item, other) == slots
        ]
        if len(found) > 1:
            found = [item for item in found if self._colours[item] == self._colours[user]]
        return found[0] if len(found) == 1 else None

    def _fits(self, candidate: Sequence[int]) -> bool:
        graph, where = self._graph, self._where
        pattern = candidate[self._pattern]
        kind = graph.kinds[pattern]
        if graph.constant[pattern] or graph.nodes[pattern].opcode == "parameter":
            return False
        if len(set(candidate)) < len(candidate):
            return False
        for place in candidate:
            if place in where or place in self._taken or graph.kinds[place] != kind:
                return False
            if len(graph.users[place]) > _MANY:
                return False
            self.walked += len(graph.users[place])
        edges = self._edges(self._pattern, pattern)
        if any(self._edges(number, place) != edges for number, place in enumerate(candidate)):
            return False
        if any(self._below[operand] and not self._is_inside(operand) for operand in graph.operands[pattern]):
            return False
        return not any(self._above[user] and not self._is_inside(user) for user in graph.users[pattern])

    def _is_inside(self, place: int) -> bool:
        """Whether a node is the pattern's own; what lies in another occurrence is outside."""
        return place in self._where and self._where[place][0] == self._pattern

    def _edges(self, number: int, place: int) -> tuple[object, ...]:
        """How a node hangs together with an occurrence; all that it does with another one does not count."""
        graph, where = self._graph, self._where
        operands = []
        for operand in graph.nodes[place].operands:
            owner = where.get(operand)
            operands.append(owner[1] if owner is not None and owner[0] == number else None)
        users = set()
        for user in graph.users[place]:
            owner = where.get(user)
            if owner is not None and owner[0] == number:
                users.add((owner[1], _slots(graph, user, place)))
        return tuple(operands), frozenset(users)

    def _add(self, candidate: Sequence[int]) -> None:
        local = len(self.members[0])
        for number, (occurrence, place) in enumerate(zip(self.members, candidate, strict=True)):
            occurrence.append(place)
            self._where[place] = (number, local)
        self._queue.append(local)
        pattern = candidate[self._pattern]
        self.walked += len(candidate)
        self.walked += _mark(pattern, self._graph.users, self._below)
        self.walked += _mark(pattern, self._graph.operands, self._above)


def _slots(graph: Graph, user: int, of: int) -> tuple[int, ...]:
    return tuple(slot for slot, operand in enumerate(graph.nodes[user].operands) if operand == of)


def _mark(start: int, following: Sequence[Sequence[int]], marks: bytearray) -> int:
    """Marks all that can be reached; returns how many were not marked before."""
    waiting = [start]
    count = 0
    while waiting:
        for place in following[waiting.pop()]:
            if not marks[place]:
                marks[place] = 1
                count += 1
                waiting.append(place)
    return count
