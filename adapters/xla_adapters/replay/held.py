"""`HeldValues`: the values of a step's tensors, known from one pass to the next without asking the tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xla_adapters.backend import Backend


class HeldValues:
    """What the device holds for tensors that replays read and write.

    Whoever asks a tensor for its value has the view machinery bring it up to date first, which for a large state costs
    more than all else that a replay does on the host. That nobody changed it meanwhile, through a view or an alias
    either, is told by its storage alone.

    Args:
        tensors: of the state.
        backend: the seam.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], backend: Backend) -> None:
        self._tensors = list(tensors)
        self._backend = backend
        self._values = [backend.snapshot(tensor) for tensor in self._tensors]
        # They live as long as their names are compared: a new one cannot have the name of an old one.
        self._storages = [tensor.untyped_storage() for tensor in self._tensors]
        self._names, self._changes = backend.storage_marks(self._tensors)

    def present(self) -> list[torch.Tensor]:
        """The values as they are now (as `Backend.snapshot`)."""
        names, changes = self._backend.storage_marks(self._tensors)
        if names != self._names or changes != self._changes:
            for position, tensor in enumerate(self._tensors):
                if names[position] != self._names[position] or changes[position] != self._changes[position]:
                    self._values[position] = self._backend.snapshot(tensor)
                    self._storages[position] = tensor.untyped_storage()
            self._names, self._changes = names, changes
        return self._values

    def write(self, positions: Sequence[int], values: Sequence[torch.Tensor]) -> None:
        """Gives tensors new values (as `Backend.inner`), seen through their views and aliases too."""
        self._backend.replace([self._tensors[position] for position in positions], values)
        for position, value in zip(positions, values, strict=True):
            self._values[position] = value
            self._changes[position] += 1

    def forget_writes(self) -> None:
        """Lets go of former values."""
        self._backend.forget_writes(self._tensors)
