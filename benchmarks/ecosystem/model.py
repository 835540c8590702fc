"""`Model`: a tiny model with batches for it, as all trainers of the table use it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks import zoo
from benchmarks.zoo import Batch


@dataclass(frozen=True)
class Model:
    """A row of the table; built in a child.

    Attributes:
        name: of the row.
        build: makes the model. Called with a batch as keyword arguments, it returns what has a `loss`.
        batch: makes a batch.
        prepare: called in the parent before it forks, to import what `build` needs.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    prepare: Callable[[], None] = lambda: None

    def seeded(self) -> nn.Module:
        """The model with the same random weights at each call."""
        torch.manual_seed(0)
        return self.build()

    def batches(self, count: int) -> list[Batch]:
        """The same random batches at each call."""
        generator = torch.Generator().manual_seed(0)
        return [self.batch(generator) for _ in range(count)]


def of_transformers(name: str, architecture: str) -> Model:
    """A model of `benchmarks.zoo`.

    Args:
        name: of the row.
        architecture: its name in the zoo.
    """
    (found,) = [one for one in zoo.ARCHITECTURES if one.name == architecture]
    return Model(name, found.build, found.batch, found.load_classes)
