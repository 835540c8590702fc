"""`TrainingState`: random states and positions, so that a resumed run continues exactly as an uninterrupted one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from xla_adapters.errors import CheckpointDamagedError
from xla_adapters.runtime import get_runtime
from xla_adapters.runtime.rng import resume_random_algorithm
from xla_adapters.utils.host_random import HostRandom

_FILE = "xla_adapters.training_state-{rank}.pt"


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """The random states of one process, and the positions of its samplers, loaders and callbacks.

    Attributes:
        python, numpy, torch: the states of their global generators.
        device: the seed of the device's random stream.
        algorithm: of the device's random numbers; an empty string if not known.
        positions: state dicts by name; only types that `torch.load(weights_only=True)` reads.
    """

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    torch: torch.Tensor
    device: int
    algorithm: str = ""
    positions: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def capture(cls, positions: Mapping[str, Any] | None = None) -> TrainingState:
        """The current state; nothing is drawn, and nothing is executed on the device."""
        return cls(
            **HostRandom.now().to_save(),
            device=get_runtime().random.seed(),
            algorithm=get_runtime().random.algorithm(),
            positions=dict(positions) if positions is not None else {},
        )

    def restore(self) -> None:
        """Sets all generators; warns if the device uses another algorithm, which draws other numbers."""
        HostRandom.of_saved(vars(self)).restore()
        get_runtime().random.set_seed(self.device)
        if self.algorithm:
            resume_random_algorithm(self.algorithm)

    def save(self, folder: Path, *, rank: int = 0) -> None:
        """Writes the state into a checkpoint folder, one file per rank."""
        torch.save(vars(self), folder / _FILE.format(rank=rank))

    @classmethod
    def load(cls, folder: Path, *, rank: int = 0) -> TrainingState | None:
        """Reads what `save` wrote for this rank; `None` if the checkpoint has none (it was saved by fewer ranks, say).

        Raises:
            CheckpointDamagedError: the file has other content.
        """
        path = folder / _FILE.format(rank=rank)
        if not path.is_file():
            return None
        values = torch.load(path, weights_only=True)
        try:
            return cls(**values)
        except TypeError as error:
            raise CheckpointDamagedError(f"{path} holds no TrainingState: {error}") from error
