"""`merge`: merges regions whose occurrences are connected in the same way.

The search for regions stops where a path leaves an occurrence and comes back. The nodes on that path may be a region
with as many occurrences. Then the two are one region, and the path is inside of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xla_adapters.cpu.graph_passes.outlining.loops import items
from xla_adapters.cpu.graph_passes.outlining.regions import Region
from xla_adapters.hlo.graph import Graph, ordered

# (occurrence of the upper region, occurrence of the lower region that reads from it).
_Read = tuple[int, int]


def merge(graph: Graph, regions: Sequence[Region]) -> list[Region]:
    """Merges pairs of regions until no pair is left that can be merged.

    Args:
        graph: the graph.
        regions: regions whose occurrences can be ordered topologically.
    """
    merged = list(regions)
    refused: set[tuple[int, ...]] = set()
    while (fewer := _fewer(graph, merged, refused)) is not None:
        merged = fewer
    return merged


def _fewer(graph: Graph, regions: list[Region], refused: set[tuple[int, ...]]) -> list[Region] | None:
    """The regions with one pair merged; None if no pair can be merged.

    Args:
        graph, regions: see `merge`.
        refused: keys of pairs that would form a cycle (sizes, and the first node of each occurrence); added to.
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
    """The edges between regions that have as many occurrences.

    Returns:
        By (upper region, lower region): for each operand of the lower region that the upper one computes, the pairs of
        occurrences.
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
    """The one-to-one assignments of lower to upper occurrences for which all pairs have the same edges.

    Args:
        reads: edges between the two regions, by operand.
        times: number of occurrences of each region.
    """
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
    """The region whose occurrences are the unions of these, in topological order."""
    both = [[*places, *others] for places, others in zip(upper, lower, strict=True)]
    order = sorted(range(len(both[0])), key=both[0].__getitem__)
    return Region([[places[local] for local in order] for places in both])
