"""Topological order of a graph in which groups of nodes are one item."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from xla_adapters.hlo.graph import Graph

# A single node (-1, position), or a group of nodes, named by the caller with two numbers that are not negative.
Item = tuple[int, int]


def ordered(graph: Graph, item_of: Sequence[Item]) -> tuple[list[Item], set[Item]]:
    """Sorts items topologically.

    Args:
        graph: the graph.
        item_of: per node, the item it belongs to.

    Returns:
        The items in order, and those that cannot be ordered: they are on a cycle, or on a path between two cycles.
    """
    needs: dict[Item, set[Item]] = {item: set() for item in item_of}
    users: dict[Item, set[Item]] = {item: set() for item in item_of}
    for place, operands in enumerate(graph.operands):
        item = item_of[place]
        for operand in operands:
            other = item_of[operand]
            if other != item:
                needs[item].add(other)
                users[other].add(item)
    order = _sorted_prefix(needs, users, set(needs))
    stuck = set(needs).difference(order)
    return order, stuck.difference(_sorted_prefix(users, needs, stuck))


def _sorted_prefix(needs: dict[Item, set[Item]], users: dict[Item, set[Item]], among: set[Item]) -> list[Item]:
    """The items of `among` that depend on no cycle, in topological order (Kahn's algorithm)."""
    missing = {item: len(needs[item] & among) for item in among}
    rank = {item: number for number, item in enumerate(needs)}
    ready = [(rank[item], item) for item, count in missing.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, item = heapq.heappop(ready)
        order.append(item)
        for user in users[item]:
            if user in missing:
                missing[user] -= 1
                if not missing[user]:
                    heapq.heappush(ready, (rank[user], user))
    return order
