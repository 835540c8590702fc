"""`LazyTensors`: what only a runtime of lazy tensors has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class LazyTensors(Protocol):
    """Looks behind lazy tensors: the device tensor, its number, its buffer and its history of writes. Optional.

    A tensor of torch_xla is a functional wrapper; the device tensor behind it (`inner`) is replaced by each operation
    that changes the wrapper in place. Step replay finds out with these methods which tensors a graph reads and writes.
    """

    def inner(self, tensor: torch.Tensor) -> torch.Tensor:
        """The device tensor behind a tensor. Unlike `Values.snapshot` it does not bring views up to date."""

    def tensor_number(self, tensor: torch.Tensor) -> int:
        """The number of the device tensor behind a tensor. Aliases share it; a later tensor has a higher one."""

    def handles(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Names the buffers of tensors that are not pending: equal names, one buffer.

        A result of an execution that has not begun yet has another name until then: call `Device.wait` before.

        Raises:
            RuntimeError: a buffer is gone, since an executable took it.
        """

    def buffers_of(self, tensors: Sequence[torch.Tensor]) -> set[int]:
        """As `handles`, without tensors whose buffer is gone."""

    def aliases(self, tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[int]:
        """Positions of those `tensors` whose device tensor is that of one of `others` (by `detach()`, say)."""

    def storage_marks(self, tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
        """For each tensor the name of its storage, and how often that was written to, through views and aliases too.

        `replace` counts as one write. What changes the device tensor itself (a collective in place) shows in
        `Values.snapshot` instead.
        """

    def replace(self, tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """As `Values.write`, given device tensors (as `inner`)."""

    def update(
        self, tensors: Sequence[torch.Tensor], before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]
    ) -> None:
        """Gives tensors values that were computed from their present ones, as an operator in place does.

        Args:
            tensors: of the device.
            before: their present values, as `Values.snapshot` returns them.
            after: the new values, of the same shapes and dtypes.
        """

    def fill(self, tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Gives all pending tensors the values that an executable computed for them. Nothing is pending afterwards.

        Args:
            tensors: the outputs given to `Executables.compile`, as `inner`.
            values: the results of the run, in the same order.
        """

    def forget_writes(self, tensors: Sequence[torch.Tensor]) -> None:
        """Frees values that tensors had before: functionalization keeps each value that `Values.write` replaced."""

    def separate_scalars(self) -> None:
        """Python numbers that are uploaded from here on share no input with earlier ones, even if they are equal."""

    def restate_dtype(self, tensor: torch.Tensor) -> None:
        """Makes a pending result hash like a tensor that was uploaded, so that the next step has the same graph.

        Results of some operations (addcdiv, the last one of Adam) do not state their dtype, which changes the hash of
        sums, means and softmax of what is computed from them. Adds nothing to the graph.
        """

    def count_as_written(self, tensor: torch.Tensor) -> None:
        """Has views of a tensor be made as of one that was written.

        A view of such a tensor is an operation of its own at each use (`weight.t()` in a forward and in its backward).
        Without this the first step would be another program than the later ones, though of the same graph hash; and a
        process that resumes would not find it in the compile cache.
        """

    def give_any_value(self, tensor: torch.Tensor) -> None:
        """Gives a tensor that has neither value nor graph some value; a failed compile leaves results like that.

        torch_xla 2.9 executes nothing as long as one exists.
        """
