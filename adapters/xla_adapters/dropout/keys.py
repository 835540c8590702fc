"""`MaskKeys`: the keys of a step's masks, which follow the device's random stream without drawing each from it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from xla_adapters.backend.interface import Backend
from xla_adapters.dropout.masks import mask_computation

# A key of two words, and a number.
_Name = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass
class MaskKeys:
    """Draws masks, each another one.

    The first mask of a step draws a key and a number from the device's stream; for the others the number goes on. Each
    is known by where the stream stood, and moves it on: what is computed again from the same place (activation
    checkpointing) gets the same mask, and whoever sets the stream to a place of his own draws a key from there.

    Args:
        backend: of the tensors.
    """

    backend: Backend
    # By where the stream stood, or will stand when the next one is drawn.
    _names: dict[int, _Name] = field(default_factory=dict)

    def mask(self, sizes: tuple[int, ...], keep: float) -> torch.Tensor:
        """A mask on the device, True where an element is kept.

        Args:
            sizes: of the mask, see `mask_computation`.
            keep: the probability of True.
        """
        state = self.backend.seed()
        name = self._names.get(state)
        if name is None:
            name = self._names[state] = self._drawn()
        else:
            # Nobody reads it, so that it is not part of any graph; but the stream moves on.
            torch.rand((), device=self.backend.device())
        mask, following = self.backend.call(mask_computation(sizes, keep), name)
        self._names.setdefault(self.backend.seed(), (*name[:2], following))
        return mask

    def _drawn(self) -> _Name:
        words = torch.randint(0, 1 << 32, (3,), dtype=torch.int64, device=self.backend.device()).to(torch.uint32)
        return words[0], words[1], words[2]
