"""`Values`: reading and setting the value behind a tensor, without recording an operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Values(Protocol):
    """Takes the value that a tensor has, and gives it another one; the undo log and step replay are built on it.

    A snapshot is a tensor that holds the value itself. The functions of torch that change tensors do not change it,
    with the exceptions that `twin` names.
    """

    def snapshot(self, tensor: torch.Tensor) -> torch.Tensor:
        """The present value of a tensor of the device, pending or not. Copies nothing where values are immutable.

        Brings the tensor up to date first, if a view of it was written to.
        """

    def bring_up_to_date(self, tensor: torch.Tensor) -> None:
        """Applies what was written to views of a tensor of the device."""

    def twin(self, snapshot: torch.Tensor) -> torch.Tensor:
        """A second snapshot of the same value, safe from operations that change the first.

        Such are batch norm on its running statistics, and `copy_`: they write to the inner tensor itself.
        """

    def rewrite(self, snapshot: torch.Tensor, twin: torch.Tensor) -> None:
        """Gives a snapshot that was changed the value of its twin. (The twin in its place would be another graph.)"""

    def holds(self, tensor: torch.Tensor, snapshot: torch.Tensor) -> bool:
        """Whether a tensor still has the value of a snapshot; asked before the pending graph is discarded."""

    def restore(self, tensor: torch.Tensor, snapshot: torch.Tensor) -> None:
        """Gives a tensor the value of a snapshot. Its views and aliases see the value too."""

    def write(self, tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Gives tensors the values of others, output tensors of an executable say. Views and aliases see them too.

        Args:
            tensors: of the device.
            values: as many, of the same shapes and dtypes; they share their buffers with `tensors` afterwards.
        """

    def copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same values in new buffers; leaves alone what is pending.

        Args:
            tensors: of the device, none of them pending.
        """
