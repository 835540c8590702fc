"""`TraceNumbers`: Python numbers that are arguments of a program instead of constants in it."""

from __future__ import annotations

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
        stand_ins: the arguments that hold them.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.values: list[float] = []
        self.stand_ins: list[torch.Tensor] = []
        self._entries: list[torch.Tensor] = []

    def add(self, value: float) -> torch.Tensor:
        """A number as a tensor of no dimension; called in a trace."""
        position = len(self.values) % _CHUNK
        if not position:
            stand_in = self._runtime.placeholders.stand_in(torch.empty(_CHUNK))
            self.stand_ins.append(stand_in)
            self._entries = list(stand_in.clone().unbind(0))
        self.values.append(value)
        return self._entries[position]

    def uploads(self) -> list[torch.Tensor]:
        """The values of the arguments."""
        return uploaded_numbers(self.values, self._runtime)


def uploaded_numbers(values: list[float], runtime: Runtime) -> list[torch.Tensor]:
    """The arguments for these numbers: one transfer for each 64 of them."""
    found = []
    for begin in range(0, len(values), _CHUNK):
        chunk = values[begin : begin + _CHUNK]
        host = torch.tensor(chunk + [0.0] * (_CHUNK - len(chunk)), dtype=torch.get_default_dtype())
        found.append(runtime.transfers.to_device(host))
    return found
