"""`TrainingState`: what makes the next step draw what the uninterrupted run would have drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from xla_adapters.backend import get_backend
from xla_adapters.errors import CheckpointDamagedError
from xla_adapters.host_random import HostRandom
from xla_adapters.random_algorithm import resume_random_algorithm

_FILE = "xla_adapters.training_state-{rank}.pt"


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """The random numbers of a process, and whatever else the run must go on from.

    Attributes:
        python, numpy, torch: the states of their global generators.
        device: the seed of the device's random stream.
        algorithm: what the device draws with; an empty string if that is not known.
        positions: of samplers, loaders, callbacks: what `torch.load` reads with `weights_only=True`.
    """

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    torch: torch.Tensor
    device: int
    algorithm: str = ""
    positions: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def capture(cls, positions: Mapping[str, Any] | None = None) -> TrainingState:
        """The state as it is now; nothing is drawn, and the device's graph is left as it is."""
        return cls(
            **HostRandom.now().to_save(),
            device=get_backend().seed(),
            algorithm=get_backend().random_algorithm(),
            positions=dict(positions) if positions is not None else {},
        )

    def restore(self) -> None:
        """Sets all generators; warns if the device draws with another algorithm, and so other numbers."""
        HostRandom.of_saved(vars(self)).restore()
        get_backend().set_seed(self.device)
        if self.algorithm:
            resume_random_algorithm(self.algorithm)

    def save(self, folder: Path, *, rank: int = 0) -> None:
        """Writes it into a checkpoint, one file for each rank."""
        torch.save(vars(self), folder / _FILE.format(rank=rank))

    @classmethod
    def load(cls, folder: Path, *, rank: int = 0) -> TrainingState | None:
        """What `save` wrote for this rank; `None` if the checkpoint has none, as when it was saved by fewer ranks.

        Raises:
            CheckpointDamagedError: the file holds something else.
        """
        path = folder / _FILE.format(rank=rank)
        if not path.is_file():
            return None
        values = torch.load(path, weights_only=True)
        try:
            return cls(**values)
        except TypeError as error:
            raise CheckpointDamagedError(f"{path} holds no TrainingState: {error}") from error
