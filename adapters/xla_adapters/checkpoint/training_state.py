"""`TrainingState`: what makes the next step draw what the uninterrupted run would have drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from xla_adapters.backend import get_backend
from xla_adapters.errors import CheckpointDamagedError
from xla_adapters.rng import HostRandom

_FILE = "xla_adapters.training_state-{rank}.pt"


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """The random numbers of a process, and whatever else the run must go on from.

    Attributes:
        python, numpy, torch: the states of their global generators.
        device: the seed of the device's random stream.
        positions: of samplers, loaders, callbacks: what `torch.load` reads with `weights_only=True`.
    """

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    torch: torch.Tensor
    device: int
    positions: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def capture(cls, positions: Mapping[str, Any] | None = None) -> TrainingState:
        """The state as it is now; nothing is drawn, and the device's graph is left as it is."""
        host = HostRandom.now()
        return cls(
            python=host.python,
            numpy=host.numpy,
            torch=host.torch,
            device=get_backend().seed(),
            positions=dict(positions) if positions is not None else {},
        )

    def restore(self) -> None:
        """Sets all generators."""
        HostRandom(self.python, self.numpy, self.torch).restore()
        get_backend().set_seed(self.device)

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
