"""`peel`: parts without their first or last occurrence, which keeps the others from being a loop.

A layer's neighbour may be of another kind: the gradient of the last layer's output is no sum, where that of the others
has a second summand, from the path around the next layer. So what is alike everywhere leaves out the summing, which
then lies between two turns. All but that layer are alike in more.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from xla_adapters.blocks.loops import is_large, items
from xla_adapters.blocks.regions import Region, grown
from xla_adapters.hlo_graph.graph import Graph
from xla_adapters.hlo_graph.order import Item, ordered

# Of so many regions, the largest: a layer and its gradient.
_MOST = 2


def peel(graph: Graph, regions: Sequence[Region]) -> Iterator[list[Region]]:
    """Arrangements of regions in which those that are large are no longer read by what they read, as loops.

    Where one lacks an end, the others are tried without one, too: what one layer leaves for its gradient is not in a
    loop then.

    Args:
        graph: of the nodes.
        regions: that are repeated.
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
        # Two that grew may have grown to the same nodes.
        if is_new and _is_disjoint(arrangement) and not ordered(graph, items(graph, arrangement, ()))[1]:
            yield list(arrangement)


def _is_disjoint(regions: Sequence[Region]) -> bool:
    places = [place for region in regions for occurrence in region.occurrences for place in occurrence]
    return len(places) == len(set(places))


def _nodes(region: Region) -> int:
    return len(region.occurrences) * len(region.occurrences[0])


def _as_loops(graph: Graph, regions: Sequence[Region], number: int, order: Sequence[Item]) -> list[Region]:
    """A region, and it without its first or its last occurrence: those of which nothing lies between the turns."""
    turns = [regions[number].occurrences[occurrence] for of, occurrence in order if of == number]
    others = [other for at, other in enumerate(regions) if at != number]
    shorter = (grown(graph, Region(fewer), others) for fewer in (turns[1:], turns[:-1]))
    return [
        one
        for one in (regions[number], *shorter)
        if is_large(one)
        and not ordered(graph, items(graph, [*regions[:number], one, *regions[number + 1 :]], {number}))[1]
    ]
