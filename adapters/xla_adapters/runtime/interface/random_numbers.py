"""`Random`: the device's random stream."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Random(Protocol):
    """The stream that random operations on the device draw from, and the algorithm they draw with.

    The state of the stream is one integer, an input of every graph that draws: another state is never another graph.

    Attributes:
        algorithm_variable: the environment variable that chooses the algorithm.
    """

    algorithm_variable: str

    def seed(self) -> int:
        """The state of the stream, of 64 bits."""

    def set_seed(self, seed: int) -> None:
        """Sets the state of the stream."""

    def position(self) -> Any:
        """Where the stream is, in a trace, too: for `is_at`. Reads nothing from the device."""

    def is_at(self, position: Any) -> bool:
        """Whether nothing was drawn since `position` was taken, in the same trace."""

    def seed_input(self) -> torch.Tensor:
        """The present state as an input of an executable."""

    def seed_number(self) -> int:
        """The `GraphInput.number` of the input that is the state of the stream."""

    def algorithm(self) -> str:
        """What random numbers are drawn with: `default`, `philox` or `three_fry`. After this call it is settled."""

    def ask_for_algorithm(self, name: str) -> str | None:
        """Asks for an algorithm, unless the environment does. Has no effect once numbers were drawn.

        Args:
            name: as `algorithm` returns it.

        Returns:
            What the environment asks for; None if it leaves the choice.

        Raises:
            ConfigError: the environment asks for an algorithm that the runtime does not know.
        """
