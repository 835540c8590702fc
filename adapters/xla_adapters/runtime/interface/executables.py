"""`Executables`: compiled graphs, and runs of them without tracing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


class Executables(Protocol):
    """Compiles the pending graph to an executable, and runs executables on tensors.

    An executable goes by a name. The runtime owns it, and may forget the one that was not used for longest (see
    `Counters.executables_kept`).
    """

    def inputs(self, outputs: Sequence[torch.Tensor]) -> list[GraphInput]:
        """What the pending graph of these tensors reads, in the order of the executable's parameters."""

    def text(self, outputs: Sequence[torch.Tensor]) -> bytes:
        """The pending graph of these tensors as a serialized HloModuleProto."""

    def name(self, outputs: Sequence[torch.Tensor], donated: Sequence[torch.Tensor]) -> bytes:
        """The name that `compile` would return; compiles nothing."""

    def compile(self, outputs: Sequence[torch.Tensor], donated: Sequence[torch.Tensor]) -> bytes:
        """Compiles the pending graph, unless it is known already. Executes nothing; the tensors stay pending.

        Args:
            outputs: the pending tensors in a fixed order, which is that of the executable's results.
            donated: inputs whose buffers the executable may reuse: a run deletes their values.

        Returns:
            The executable's name.

        Raises:
            RuntimeError: the graph cannot be compiled.
        """

    def run(
        self, name: bytes, inputs: Sequence[torch.Tensor], *, taken: Sequence[torch.Tensor] = ()
    ) -> list[torch.Tensor]:
        """Executes without tracing. Returns at once; the device may still compute.

        Args:
            name: of the executable.
            inputs: in the order of its parameters.
            taken: those of the inputs whose buffers it reuses. They are kept alive until the execution is over, since
                letting go of one earlier would block until then.

        Returns:
            The outputs, in the order they had in `compile`; the caller owns them.

        Raises:
            RuntimeError: the runtime has forgotten the executable, or the execution failed.
        """

    def finish_run(self) -> None:
        """Ends a step that `run` executed, as `Tracing.finish_step` does: advances the random stream, for example."""
