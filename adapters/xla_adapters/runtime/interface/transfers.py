"""`Transfers`: copies between host and device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch


class Transfers(Protocol):
    """Copies values between host and device, as few transfers as possible."""

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies a host tensor to the device.

        Returns:
            A tensor without history of the same shape and dtype, in a buffer of its own: no other upload of an equal
            number shares it, and it never becomes a constant of a graph. On every device whole, under SPMD.
        """

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies tensors to the host in one transfer, and waits for it.

        What is pending is executed first, also steps that wait to be executed together. Tensors cut over devices are
        put together. Whatever waits in `piggy_back` is copied too.

        Args:
            tensors: on the device or, unchanged then, on the host.

        Returns:
            New host tensors without history, in the same order.
        """

    def upload_numbers(self, numbers: Sequence[tuple[float, torch.dtype]]) -> list[torch.Tensor]:
        """Uploads numbers as inputs of an executable, in one transfer.

        Args:
            numbers: each with the dtype that it gets.

        Returns:
            Tensors of no dimension, to be passed to `Executables.run` alone.
        """

    def piggy_back(self, tensors: Sequence[torch.Tensor], receive: Callable[[list[torch.Tensor]], None]) -> None:
        """Copies tensors to the host together with the next call of `to_host`, which costs no transfer of its own.

        Args:
            tensors: on the device; kept alive until then.
            receive: called with the copies, in the same order, before that `to_host` returns.
        """

    def deliver_piggy_backed(self) -> None:
        """Copies now what waits in `piggy_back`; no transfer if nothing does."""
