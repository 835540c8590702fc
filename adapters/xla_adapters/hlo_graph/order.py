"""The order of a graph's nodes, some of which are written together."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from xla_adapters.hlo_graph.graph import Graph

# What is written at once: the node at a place (-1, place), or something else by numbers that are not negative.
Item = tuple[int, int]


def ordered(graph: Graph, item_of: Sequence[Item]) -> tuple[list[Item], set[Item]]:
    """Items, each behind what it reads.

    Args:
        graph: of the nodes.
        item_of: what each node is written with.

    Returns:
        Them, and those that wait for themselves, or lie between such.
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
    order = _peeled(needs, users, set(needs))
    stuck = set(needs).difference(order)
    return order, stuck.difference(_peeled(users, needs, stuck))


def _peeled(needs: dict[Item, set[Item]], users: dict[Item, set[Item]], among: set[Item]) -> list[Item]:
    """Items that need nothing but those before them."""
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
