"""What the runtime says of graphs and executables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

# The position of an input or output of one run, and the run; or None for what is not of one run.
Key = tuple[int, "int | None"]


@dataclass(frozen=True, kw_only=True)
class GraphInput:
    """An input of a pending graph.

    Attributes:
        handle: names the buffer; as long as it lives, no other has it.
        number: of the tensor that used the buffer last.
        value: a tensor that shares the buffer.
    """

    handle: int
    number: int
    value: torch.Tensor


@dataclass(frozen=True)
class RepeatedGraph:
    """An executable that runs a graph several times, one after another.

    Attributes:
        name: of the executable.
        order: for each of its inputs the position among the graph's own, and the run; None if the first run begins
            with it, or all read it.
        results: for each of its outputs the position among the graph's own, and the run; None if it is what the runs
            carried on.
    """

    name: bytes
    order: tuple[Key, ...]
    results: tuple[Key, ...]


class ComputedTensors(Protocol):
    """An object that writes the results of executables into tensors."""

    def computed(self) -> Iterable[torch.Tensor]:
        """The tensors that hold what was written, which nobody has changed since."""
