"""`kept_bytes`: the bytes of each operator's output that are kept for the backward."""

from __future__ import annotations

from collections.abc import Mapping

from xla_adapters.sharding.planner.graph import Graph, Operator

PRODUCTS = frozenset(
    ("linear", "addmm", "mm", "bmm", "baddbmm", "matmul", "conv1d", "conv2d", "conv3d", "scaled_dot_product_attention")
)
_SUMS = ("add", "sub")
# Their results are parts of a value.
_PARTS = ("split", "chunk", "unbind")


def kept_shares(graph: Graph, *, recomputes: bool, rounds: bool) -> Mapping[int, float]:
    """Which part of its output's bytes is kept, by operator: 1, a half, or (left out) nothing.

    An output is kept if anything but an addition uses it.

    Args:
        graph: the operators.
        recomputes: the compiler computes the results of element-wise operators again, if they come from one kept value
            or are no sum; and parts of a value are no copies.
        rounds: what only products use is kept in bfloat16.
    """
    users: dict[int, list[Operator]] = {}
    for operator in graph.operators:
        for operand in operator.operands:
            if operand.source is not None:
                users.setdefault(operand.source, []).append(operator)
    again = recomputed(graph) if recomputes else set[int]()
    found: dict[int, float] = {}
    for operator in graph.operators:
        needed = [user for user in users.get(operator.index, []) if user.target not in _SUMS]
        if recomputes and operator.target in _PARTS:
            continue
        products = [user for user in needed if user.target in PRODUCTS]
        width = _width(operator)
        half = 0.5 if rounds and width == 4 else 1.0
        if operator.index in again:
            if products:
                found[operator.index] = half
        elif needed:
            found[operator.index] = half if len(products) == len(needed) else 1.0
    return found


def recomputed(graph: Graph) -> set[int]:
    """Element-wise operators, except sums of several values: a residual connection would need all layers before it."""
    roots: dict[int, frozenset[int]] = {}
    found: set[int] = set()
    for operator in graph.operators:
        sources = [roots[operand.source] for operand in operator.operands if operand.source is not None]
        behind = frozenset[int]().union(*sources)
        if operator.pointwise and (operator.target not in _SUMS or len(behind) == 1):
            found.add(operator.index)
            roots[operator.index] = behind
        else:
            roots[operator.index] = frozenset((operator.index,))
    return found


def _width(operator: Operator) -> int:
    """Bytes of an element of the output."""
    number = 1
    for size in operator.shape:
        number *= size
    return round(operator.size / number) if number else 0
