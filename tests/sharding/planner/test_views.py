"""A split dimension followed through a view is the split that slicing the result gives."""

from __future__ import annotations

import itertools

import pytest
import torch

from xla_adapters.sharding.planner.graph import VIEWS, broadcast, reshaped

_SHAPES = [
    ((8, 16, 64), (8, 16, 4, 16)),
    ((8, 16, 4, 16), (8, 16, 64)),
    ((8, 16, 64), (128, 64)),
    ((128, 64), (8, 16, 64)),
    ((1, 16, 64), (16, 64)),
    ((8, 2, 2, 16), (8, 4, 16)),
    ((8, 12), (12, 8)),
    ((4, 6, 4), (2, 2, 24, 1)),
    ((8,), (8, 1)),
]


@pytest.mark.parametrize(("before", "after"), _SHAPES)
def test_reshape(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    tensor = torch.arange(torch.Size(before).numel()).reshape(before)
    whole = tensor.reshape(after)
    dims = reshaped(before, after)
    for dim, to in enumerate(dims):
        if to is None or before[dim] % 2 or after[to] % 2:
            continue
        local = list(after)
        local[to] //= 2
        for part, expected in zip(tensor.chunk(2, dim), whole.chunk(2, to), strict=True):
            assert torch.equal(part.reshape(local), expected), (dim, to)


def test_what_cannot_be_followed_is_lost() -> None:
    assert reshaped((8, 16, 64), (128, 64)) == (0, None, 1)
    assert reshaped((8, 16, 4, 16), (8, 16, 64)) == (0, 1, 2, None)
    assert broadcast((1, 64), (8, 16, 64)) == (None, 2)


@pytest.mark.parametrize(
    ("name", "args"),
    [("transpose", (1, 2)), ("transpose", (-1, 0)), ("permute", ([2, 0, 1],)), ("select", (1, 0)), ("unsqueeze", (1,))],
)
def test_moves(name: str, args: tuple[object, ...]) -> None:
    tensor = torch.arange(2 * 4 * 6).reshape(2, 4, 6)
    move = getattr(torch, name)
    whole = move(tensor, *args)
    dims = VIEWS[name](tuple(tensor.shape), tuple(whole.shape), args)
    followed = [(dim, to) for dim, to in enumerate(dims) if to is not None]
    assert len(followed) == (2 if name == "select" else 3)
    for (dim, to), half in itertools.product(followed, range(2)):
        assert torch.equal(move(tensor.chunk(2, dim)[half], *args), whole.chunk(2, to)[half])
