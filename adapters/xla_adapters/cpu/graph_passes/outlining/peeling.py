"""`peel`: loop peeling. Drops the first or last occurrence of a region, so that the others can be a loop.

The first or last layer is often special: the gradient of the last layer's output has one summand, that of the other
layers has two (the second comes from the residual path around the next layer). What all layers share leaves the sum
out, so that it is between two iterations, and there is no loop. Without the last layer, the sum is part of the region.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from xla_adapters.cpu.graph_passes.outlining.loops import is_large, items
from xla_adapters.cpu.graph_passes.outlining.regions import Region, grown
from xla_adapters.hlo.graph import Graph, Item, ordered

# Only this many of the largest regions are peeled: usually a layer and its gradient.
_MOST = 2


def peel(graph: Graph, regions: Sequence[Region]) -> Iterator[list[Region]]:
    """Variants of the regions in which the large ones can be loops.

    All combinations are tried: if the forward region loses its last layer, its gradient must usually lose one, too.

    Args:
        graph: the graph.
        regions: the repeated subgraphs.
    """
    large = sorted(
        (number for number, region in enumerate(regions) if is_large(region)),
        key=lambda number: _nodes(regions[number]),
        reverse=True,
    )[:_MOST]
    order, _ = ordered(graph, items(graph, regions, ()))
    choices = [[region] for region in regions]
    for number in large:
        choices[number] = _as_loops(graph, regions, number, order) or choices[number]
    for arrangement in itertools.product(*choices):
        is_new = any(one is not region for one, region in zip(arrangement, regions, strict=True))
        # Two regions that were grown may have taken the same nodes.
        if is_new and _is_disjoint(arrangement) and not ordered(graph, items(graph, arrangement, ()))[1]:
            yield list(arrangement)


def _is_disjoint(regions: Sequence[Region]) -> bool:
    places = [place for region in regions for occurrence in region.occurrences for place in occurrence]
    return len(places) == len(set(places))


def _nodes(region: Region) -> int:
    return len(region.occurrences) * len(region.occurrences[0])


def _as_loops(graph: Graph, regions: Sequence[Region], number: int, order: Sequence[Item]) -> list[Region]:
    """The variants of a region (whole, without its first, without its last occurrence) that can be ordered as loops."""
    iterations = [regions[number].occurrences[occurrence] for of, occurrence in order if of == number]
    others = [other for at, other in enumerate(regions) if at != number]
    shorter = (grown(graph, Region(fewer), others) for fewer in (iterations[1:], iterations[:-1]))
    return [
        one
        for one in (regions[number], *shorter)
        if is_large(one)
        and not ordered(graph, items(graph, [*regions[:number], one, *regions[number + 1 :]], {number}))[1]
    ]
