"""`nn.Module._apply` moves a module, and sets new parameters where the old ones cannot hold the new values."""

from __future__ import annotations

import inspect

import torch
from torch import nn


def test_arguments() -> None:
    assert list(inspect.signature(nn.Module._apply).parameters) == ["self", "fn", "recurse"]


def test_children_are_moved_by_their_own() -> None:
    moved: list[nn.Module] = []

    class Child(nn.Linear):
        def _apply(self, fn: object, recurse: bool = True) -> Child:
            moved.append(self)
            return super()._apply(fn, recurse)  # type: ignore[no-any-return]

    nn.Sequential(Child(1, 1)).to(torch.float64)
    assert len(moved) == 1
