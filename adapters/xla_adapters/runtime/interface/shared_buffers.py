"""`SharedBuffers`: tensors that share a buffer, where copying a tensor copies nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from xla_adapters.runtime.interface.executables import ComputedTensors


class SharedBuffers(Protocol):
    """Finds tensors that share a buffer, and gives each a buffer of its own. Optional.

    Where `copy_`, `clone` and `to(copy=True)` leave two tensors with one buffer, an executable that reuses the buffer
    of one deletes the value of the other. These methods keep that from happening without asking about every tensor at
    every step: they remember which tensors had a buffer of their own, and count copies.
    """

    def copies_made(self) -> int:
        """A number that changes when tensors may have been copied since; uploads do not change it. Cheap."""

    def note_own_buffers(self, tensors: Iterable[torch.Tensor]) -> None:
        """Remembers that these tensors share no buffer, because an executable computed them, say."""

    def note_writer(self, writer: ComputedTensors) -> None:
        """Remembers an object that knows of tensors without shared buffers, to be asked as long as it lives."""

    def may_share(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of these tensors that share their buffer with another live tensor. May execute what is pending."""

    def is_unknown(self, tensor: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether a tensor that a traced step changes may have shared its buffer before the step.

        Args:
            tensor: of the device.
            value: what it held before, as `LazyTensors.inner`.
        """

    def separate(self, tensors: Sequence[torch.Tensor]) -> None:
        """Gives these tensors new buffers with one execution; leaves alone what is pending."""

    def separate_state(self) -> None:
        """Gives all remembered tensors buffers of their own, if copies were made since the last traced step.

        The first call looks at all live tensors. Does nothing under SPMD.
        """

    def note_separated(self) -> None:
        """Says that whatever was copied until now has been looked at."""

    def give_own_buffers(
        self, values: Sequence[torch.Tensor], others: Iterable[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Gives new buffers to the other tensors that share one with these values; leaves alone what is pending.

        Args:
            values: as `LazyTensors.inner`; those that are pending are left out.
            others: where to look; None for all live tensors, which is slow.

        Returns:
            The tensors that were given new buffers.
        """

    def free_for_results(self, values: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Lets the pending graph write results where these values lie, though each of them had shared its buffer.

        Call it after `give_own_buffers`: no other tensor may have the buffer any more. Without it the results get new
        buffers this time, which makes it another executable than that of later calls. Does nothing under SPMD.

        Args:
            values: as `LazyTensors.inner`; those that are pending are left alone.
            results: the pending tensors, one for each value.
        """
