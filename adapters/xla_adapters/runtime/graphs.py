"""What the runtime says of graphs and executables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch


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


class ComputedTensors(Protocol):
    """An object that writes the results of executables into tensors."""

    def computed(self) -> Iterable[torch.Tensor]:
        """The tensors that hold what was written, which nobody has changed since."""
