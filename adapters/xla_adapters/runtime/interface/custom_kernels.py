"""`CustomKernels`: computations that extensions add to graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch


class CustomKernels(Protocol):
    """Adds computations to graphs that no operation of torch expresses. Optional: only extensions use it."""

    def call(self, computation: bytes, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Records a computation as part of the pending graph.

        Args:
            computation: a serialized HloModuleProto.
            inputs: of the device, in the order of its parameters.

        Returns:
            Its results, pending.
        """

    def replaced(self, name: str, kernel: Callable[..., torch.Tensor]) -> AbstractContextManager[None]:
        """A context in which another function computes an operation of aten, also for autograd in C++.

        Only in the thread that enters it. An operation for which the user has registered a kernel stays as it is.

        Args:
            name: of the operation, with its overload: `sum.dim_IntList`.
            kernel: called with a function that computes the operation as before, then the operation's arguments.
        """

    def compute_once(self, tensor: torch.Tensor) -> None:
        """Records a barrier after a pending value, so that the compiler does not compute it again in each reader.

        Does nothing if the tensor has a value.
        """
