"""`Placeholders`: traces of code that runs with placeholders in place of its tensors, compiled to one executable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


class Placeholders(Protocol):
    """Records operations on placeholders, and compiles what was recorded. Optional.

    A runtime that is eager has no pending graph outside of a trace. Inside, each operation on a placeholder is recorded
    and returns a tensor without a value. What is read by the program is an argument of it: a tensor that has a value
    and is used in a trace without being an argument is an error when the program is built, never a constant.
    """

    def recording(self) -> AbstractContextManager[None]:
        """A context in which operations are recorded instead of executed."""

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """A placeholder of the same shape and dtype: an argument of the program.

        It must not be written to; `clone` it inside the trace.
        """

    def random_state(self) -> torch.Tensor:
        """The state of the device's random stream, as an argument of a program. Copies nothing."""

    def set_random_state(self, state: torch.Tensor) -> None:
        """Sets the state to one that `random_state` returned or a program computed."""

    def tracing_random(self) -> AbstractContextManager[Callable[[], torch.Tensor]]:
        """A context in which random operations of a trace draw from a placeholder of the state.

        Yields a function that returns the present state in the trace: an argument of the program at first, and another
        tensor (`same_value` tells) once the trace has drawn. The stream outside is not moved.
        """

    def same_value(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether two states of `tracing_random` are the same one."""

    def text(self, results: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor]) -> str:
        """The program that computes these results, as StableHLO. Equal texts are equal programs; compiles nothing.

        Raises:
            RuntimeError: a result depends on a tensor that is none of the arguments.
        """

    def compile(
        self,
        results: Sequence[torch.Tensor],
        arguments: Sequence[torch.Tensor],
        donated: Sequence[int],
        name: str,
    ) -> Run:
        """Compiles the program.

        Args:
            results: of the trace.
            arguments: placeholders, in the order in which the executable takes their values.
            donated: positions of arguments whose buffers the executable reuses. A run deletes their values.
            name: of the executable, for profiles.

        Returns:
            A function that executes it and returns at once.

        Raises:
            RuntimeError: it cannot be compiled.
        """
