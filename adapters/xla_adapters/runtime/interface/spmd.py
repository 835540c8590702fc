"""`Spmd`: tensors that are cut over the devices of a process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from xla_adapters.runtime.parts import Part
from xla_adapters.runtime.tile_assignment import TileAssignment


class Spmd(Protocol):
    """Cuts tensors over the devices that one process drives, and moves their parts. Optional.

    A tensor keeps its full shape in Python; a `TileAssignment` says which device holds which part. All methods need a
    runtime that was started with `Device.initialize(spmd=True)`.
    """

    def shard(self, tensor: torch.Tensor, tiles: TileAssignment) -> None:
        """Cuts a tensor in place that has a value (parameter, optimizer state, batch), unless it is cut so already."""

    def annotate_whole(self, tensor: torch.Tensor) -> None:
        """Annotates a tensor that has a value and no annotation: every device holds all of it."""

    def constrain(
        self, tensor: torch.Tensor, tiles: TileAssignment, *, gradient: TileAssignment | None = None
    ) -> torch.Tensor:
        """Prescribes how an intermediate value of the step is cut.

        Args:
            tensor: pending; stays as it is.
            tiles: how its value is cut.
            gradient: how its gradient is cut; as `tiles` if None.

        Returns:
            The value cut so, to be used in place of `tensor`.
        """

    def tiles_of(self, tensor: torch.Tensor) -> TileAssignment | None:
        """How a tensor is cut; None if it is not annotated, or if every device holds it whole."""

    def layouts(self, tensors: Sequence[torch.Tensor]) -> list[str]:
        """How each tensor lies on the devices, as text to compare."""

    def upload_sharded(self, tensor: torch.Tensor, tiles: TileAssignment) -> torch.Tensor:
        """Copies a host tensor to the devices, to each its own part only; returns a new tensor without history."""

    def plain(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself, if it is a wrapper that shows how it is cut; other tensors unchanged."""

    def gathering_on_host(self) -> AbstractContextManager[None]:
        """A context in which the runtime's own saving puts cut tensors together on the host, as `Transfers.to_host`."""

    def local_parts(self, tensor: torch.Tensor) -> list[Part]:
        """What each device of this process holds of a cut tensor; empty if every device holds it whole.

        Executes what is pending if the tensor is, and waits.
        """

    def parts_to_host(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Copies the parts that `local_parts` lists to the host, in its order and without padding."""

    def upload_parts(self, parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Makes a tensor from its parts; each device receives its own part only.

        Args:
            parts: host tensors, of the sizes and in the order of `local_parts(like)`.
            like: a tensor of the device, cut as the new one is to be.
        """
