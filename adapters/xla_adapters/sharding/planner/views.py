"""How views (reshape, transpose, broadcast, ...) map dimensions of a tensor to dimensions of the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

Shape = tuple[int, ...]
# For each dimension of the input, the dimension of the output that has its split; None if the split is lost.
Dims = tuple[int | None, ...]


def identity(rank: int) -> Dims:
    """The mapping of a view that changes nothing."""
    return tuple(range(rank))


def compose(first: Dims, second: Dims) -> Dims:
    """The mapping of two views, one after the other."""
    return tuple(None if dim is None else second[dim] for dim in first)


def reshaped(before: Shape, after: Shape) -> Dims:
    """The mapping of `view` and `reshape`.

    Dimensions are taken in the smallest groups of equal product. In a group, only the outermost dimension of the input
    can be split contiguously; it maps to the outermost dimension of the output.
    """
    result: list[int | None] = [None] * len(before)
    i = j = 0
    while i < len(before) and j < len(after):
        ins, outs = [i], [j]
        left, right = before[i], after[j]
        while left != right:
            if left < right and ins[-1] + 1 < len(before):
                ins.append(ins[-1] + 1)
                left *= before[ins[-1]]
            elif outs[-1] + 1 < len(after):
                outs.append(outs[-1] + 1)
                right *= after[outs[-1]]
            else:
                return tuple(result)
        outer_in = next((dim for dim in ins if before[dim] > 1), ins[0])
        outer_out = next((dim for dim in outs if after[dim] > 1), outs[0])
        result[outer_in] = outer_out
        i, j = ins[-1] + 1, outs[-1] + 1
    return tuple(result)


def broadcast(before: Shape, after: Shape) -> Dims:
    """The mapping of a broadcast: aligned at the last dimension; an expanded dimension is lost."""
    offset = len(after) - len(before)
    return tuple(
        dim + offset if dim + offset >= 0 and after[dim + offset] == size else None for dim, size in enumerate(before)
    )


def _transposed(before: Shape, _after: Shape, args: Sequence[Any]) -> Dims:
    rank = len(before)
    first, second = (args[0] % rank, args[1] % rank) if len(args) >= 2 else (rank - 2, rank - 1)
    order = list(range(rank))
    if rank > 1:
        order[first], order[second] = second, first
    return tuple(order)


def _permuted(before: Shape, _after: Shape, args: Sequence[Any]) -> Dims:
    order = [dim % len(before) for dim in args[0]]
    return tuple(order.index(dim) for dim in range(len(before)))


def _selected(before: Shape, _after: Shape, args: Sequence[Any]) -> Dims:
    gone = args[0] % len(before)
    return tuple(None if dim == gone else dim - (dim > gone) for dim in range(len(before)))


def _unsqueezed(before: Shape, after: Shape, args: Sequence[Any]) -> Dims:
    new = args[0] % len(after)
    return tuple(dim + (dim >= new) for dim in range(len(before)))


def _reshaped(before: Shape, after: Shape, _args: Sequence[Any]) -> Dims:
    return reshaped(before, after)


def _broadcast(before: Shape, after: Shape, _args: Sequence[Any]) -> Dims:
    return broadcast(before, after)


# By name of the operator; called with the shapes before and after, and the arguments after the tensor.
VIEWS: dict[str, Callable[[Shape, Shape, Sequence[Any]], Dims]] = {
    **dict.fromkeys(
        ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "view_as", "reshape_as"), _reshaped
    ),
    **dict.fromkeys(("transpose", "swapaxes", "t", "numpy_T", "mT"), _transposed),
    "permute": _permuted,
    "select": _selected,
    "unsqueeze": _unsqueezed,
    **dict.fromkeys(
        (
            "expand", "expand_as", "slice", "contiguous", "clone", "alias", "to", "_to_copy", "type_as", "dropout",
            "feature_dropout", "lift_fresh_copy", "float", "bfloat16", "half", "double", "triu", "tril", "detach_",
            "constant_pad_nd", "pad",
        ),
        _broadcast,
    ),
}  # fmt: skip


def bytes_of(shape: Shape, itemsize: int) -> float:
    """Bytes of a tensor."""
    return float(math.prod(shape)) * itemsize
