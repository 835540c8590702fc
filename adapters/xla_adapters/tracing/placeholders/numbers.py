"""`TraceNumbers`: Python numbers that are arguments of a program instead of constants in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xla_adapters.runtime import Runtime

# Numbers of one argument: they are uploaded together.
_CHUNK = 64


class TraceNumbers:
    """Numbers that may differ in the next call, packed into few arguments.

    Args:
        runtime: the runtime.

    Attributes:
        values: in the order in which they were added.
        chunks: for each argument, how many numbers it holds, and its dtype.
        stand_ins: the arguments that hold them.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.values: list[float] = []
        self.chunks: list[tuple[int, torch.dtype]] = []
        self.stand_ins: list[torch.Tensor] = []
        self._entries: list[torch.Tensor] = []

    def add(self, value: float, dtype: torch.dtype) -> torch.Tensor:
        """A number as a tensor of no dimension; called in a trace."""
        count, of_last = self.chunks[-1] if self.chunks else (_CHUNK, dtype)
        if count == _CHUNK or of_last != dtype:
            count = 0
            stand_in = self._runtime.placeholders.stand_in(torch.empty(_CHUNK, dtype=dtype))
            self.stand_ins.append(stand_in)
            self.chunks.append((0, dtype))
            self._entries = list(stand_in.clone().unbind(0))
        self.chunks[-1] = count + 1, dtype
        self.values.append(value)
        return self._entries[count]

    def uploads(self) -> list[torch.Tensor]:
        """The values of the arguments."""
        return uploaded_numbers(self.values, self.chunks, self._runtime)


def uploaded_numbers(
    values: list[float], chunks: Sequence[tuple[int, torch.dtype]], runtime: Runtime
) -> list[torch.Tensor]:
    """The arguments for these numbers: one transfer for each of `TraceNumbers.chunks`."""
    found, begin = [], 0
    for count, dtype in chunks:
        host = torch.tensor(values[begin : begin + count] + [0.0] * (_CHUNK - count), dtype=dtype)
        found.append(runtime.transfers.to_device(host))
        begin += count
    return found
