"""`AbstractTensors`: tensors without memory, and graphs of them, to be compiled for devices that are not there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class AbstractTensors(Protocol):
    """Makes tensors that have a shape and no value, and lowers the graphs that are traced with them. Optional.

    Such a tensor can be traced like any other; whatever executes with it fails.
    """

    def prepare(self) -> None:
        """Makes a device known that is not there, in a process that only traces: before the runtime starts."""

    def placeholder(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the device, without memory."""

    def lower(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> tuple[bytes, list[int | None]]:
        """The pending graph of some tensors, before any optimisation.

        Args:
            outputs: pending tensors, in the order of the graph's results.
            inputs: tensors with a value, or without memory.

        Returns:
            A serialized HloModuleProto, or the text of an MLIR module, and the number of each input's parameter (None
            if the graph does not read it). Shardings of tensors without memory, and donations, are not in it.
        """
