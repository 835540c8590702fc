"""`find_regions`: finds subgraphs that occur several times.

The search starts from equal nodes (seeds) and grows all occurrences at once, along operands and users. A node is added
if it corresponds in each occurrence, and if no path leaves an occurrence and comes back to it: such a subgraph could
not be one call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from xla_adapters.hlo.graph import Graph

# Opcodes to start from first: a layer has few of each.
_ANCHORS = ("dot", "convolution", "reduce", "batch-norm-training", "batch-norm-grad")
# The fewest occurrences, and the fewest instructions of each, that are worth a call.
TIMES, _SIZE = 3, 6
# Limit of the whole search: visited nodes per node of the graph. What was found by then is used.
_EFFORT = 200
# The search does not follow the users of a node that has more users than this.
_MANY = 64
# Seeds must have equal neighbourhoods of this radius. With a larger one the first and last layer would differ.
_ROUNDS = 2
# Opcodes that stay in a region even if only nodes outside use the result.
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
    """A subgraph that occurs several times.

    Attributes:
        occurrences: the nodes of each occurrence in topological order; corresponding nodes have the same position.
    """

    occurrences: list[list[int]]


def find_regions(graph: Graph) -> list[Region]:
    """Finds repeated subgraphs; no node is in two of them."""
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
    """Grows a region further, after occurrences were removed that had limited it.

    Args:
        graph: the graph.
        region: the remaining occurrences.
        others: regions whose nodes must not be taken.
    """
    taken = {place for other in others for occurrence in other.occurrences for place in occurrence}
    more = _Growth(graph, _colours(graph), taken, region.occurrences)
    more.grow(_EFFORT * len(graph.nodes))
    more.trim()
    return Region(more.ordered())


def _colours(graph: Graph) -> list[int]:
    """Per node, a number that is equal for nodes with equal neighbourhoods (Weisfeiler-Lehman colours)."""
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
    """Groups of nodes of one colour (seeds), in the order in which they are tried."""
    classes: dict[int, list[int]] = {}
    for place, node in enumerate(graph.nodes):
        if not graph.constant[place] and node.opcode != "parameter":
            classes.setdefault(colours[place], []).append(place)
    many = [places for places in classes.values() if len(places) >= TIMES]
    rank = {opcode: number for number, opcode in enumerate(_ANCHORS)}
    # The most common group size is the number of layers. Larger groups occur repeatedly in each, and would split it.
    common = Counter(len(places) for places in many)

    def order(places: list[int]) -> tuple[int, int, int, list[int]]:
        return rank.get(graph.nodes[places[0]].opcode, len(rank)), -common[len(places)], -len(places), places

    return sorted(many, key=order)


class _Growth:
    """Grows the occurrences of one region in parallel. The middle occurrence is the pattern for the others.

    Args:
        graph: the graph.
        colours: see `_colours`.
        taken: nodes that belong to other regions.
        members: the nodes that each occurrence begins with.

    Attributes:
        members: the nodes of each occurrence.
        walked: number of nodes visited so far.
    """

    def __init__(self, graph: Graph, colours: Sequence[int], taken: set[int], members: Sequence[Sequence[int]]) -> None:
        self._graph = graph
        self._colours = colours
        self._taken = taken
        self.members: list[list[int]] = [[] for _ in members]
        # Allocating the marks counts as work, too.
        self.walked = len(graph.nodes) // 8
        # Per node: its occurrence, and its position in it.
        self._where: dict[int, tuple[int, int]] = {}
        self._pattern = len(members) // 2
        # Descendants and ancestors of the pattern's nodes.
        self._below = bytearray(len(graph.nodes))
        self._above = bytearray(len(graph.nodes))
        self._queue: list[int] = []
        for alike in zip(*members, strict=True):
            self._add(alike)

    def grow(self, effort: int) -> None:
        """Adds nodes until none fits, or until more than `effort` nodes were visited."""
        at = 0
        while at < len(self._queue) and self.walked <= effort:
            local = self._queue[at]
            at += 1
            self._try_operands(local)
            self._try_users(local)

    def trim(self) -> None:
        """Removes nodes that are cheaper outside.

        A cheap node that only nodes outside use is computed outside. An element of a tuple that was made outside stays
        outside, so that the element is an argument and not the tuple.
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
        """The members in topological order."""
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
        """The user of node `other` that corresponds to `user`, which reads the pattern's node `of`; None if unclear."""
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
        """Whether a node is in the pattern; nodes of other occurrences are outside."""
        return place in self._where and self._where[place][0] == self._pattern

    def _edges(self, number: int, place: int) -> tuple[object, ...]:
        """The edges between a node and occurrence `number`, in a form that is comparable between occurrences."""
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
    """Marks all nodes reachable from `start`; returns how many were not marked before."""
    waiting = [start]
    count = 0
    while waiting:
        for place in following[waiting.pop()]:
            if not marks[place]:
                marks[place] = 1
                count += 1
                waiting.append(place)
    return count
