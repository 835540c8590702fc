"""`join`: parts of a graph that hang together alike, as one.

The search for parts stops where a path leaves one and comes back. What lies on that path may be a part, too, that
occurs as often: then both together are one, that nothing leaves and comes back to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xla_adapters.blocks.loops import items
from xla_adapters.blocks.regions import Region
from xla_adapters.hlo_graph.graph import Graph
from xla_adapters.hlo_graph.order import ordered

# Occurrences of two regions, a node of one of which reads a node of the other.
_Read = tuple[int, int]


def join(graph: Graph, regions: Sequence[Region]) -> list[Region]:
    """The regions, of which those that can be are one.

    Args:
        graph: of the nodes.
        regions: none of which waits for itself.
    """
    joined = list(regions)
    refused: set[tuple[int, ...]] = set()
    while (fewer := _fewer(graph, joined, refused)) is not None:
        joined = fewer
    return joined


def _fewer(graph: Graph, regions: list[Region], refused: set[tuple[int, ...]]) -> list[Region] | None:
    """With two of them as one, which stands where the first one did; None if there are no such two.

    Args:
        graph, regions: see `join`.
        refused: what would wait for itself, by the sizes and a node of each occurrence of both; is added to.
    """
    for (above, below), reads in _reads(graph, regions).items():
        for partners in _partners(reads, len(regions[above].occurrences)):
            upper = regions[above].occurrences
            lower = [regions[below].occurrences[partner] for partner in partners]
            key = (len(upper[0]), len(lower[0]), *(occurrence[0] for occurrence in (*upper, *lower)))
            if key in refused:
                continue
            fewer = list(regions)
            fewer[min(above, below)] = _one(upper, lower)
            del fewer[max(above, below)]
            if not ordered(graph, items(graph, fewer, ()))[1]:
                return fewer
            refused.add(key)
    return None


def _reads(graph: Graph, regions: Sequence[Region]) -> dict[tuple[int, int], list[list[_Read]]]:
    """Which occurrences of a region read which of another, that occurs as often.

    Returns:
        By the two regions; for each operand of a node of the second that a node of the first is.
    """
    where = {
        place: (number, occurrence, local)
        for number, region in enumerate(regions)
        for occurrence, places in enumerate(region.occurrences)
        for local, place in enumerate(places)
    }
    found: dict[tuple[int, int], dict[tuple[int, int, int], list[_Read]]] = {}
    for place, (below, reader, local) in where.items():
        for slot, operand in enumerate(graph.nodes[place].operands):
            above, read, other = where.get(operand, (below, 0, 0))
            if above != below and len(regions[above].occurrences) == len(regions[below].occurrences):
                found.setdefault((above, below), {}).setdefault((other, local, slot), []).append((read, reader))
    return {pair: list(reads.values()) for pair, reads in found.items()}


def _partners(reads: Iterable[Sequence[_Read]], times: int) -> list[tuple[int, ...]]:
    """For each occurrence of the first region that of the second, so that they hang together alike everywhere."""
    found: dict[tuple[int, ...], None] = {}
    for pairs in reads:
        partner = dict(pairs)
        if len(pairs) == len(partner) == len(set(partner.values())) == times:
            found[tuple(partner[occurrence] for occurrence in range(times))] = None
    return [
        partners
        for partners in found
        if all(sum(partners[read] == reader for read, reader in pairs) in (0, times) for pairs in reads)
    ]


def _one(upper: Sequence[Sequence[int]], lower: Sequence[Sequence[int]]) -> Region:
    """Occurrences and their partners, each node behind its operands."""
    both = [[*places, *others] for places, others in zip(upper, lower, strict=True)]
    order = sorted(range(len(both[0])), key=both[0].__getitem__)
    return Region([[places[local] for local in order] for places in both])
