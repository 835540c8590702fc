"""`MaskKeys`: the keys of a step's masks, which follow the device's random stream without drawing each from it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from xla_adapters.backend.interface import Backend
from xla_adapters.dropout.masks import mask_computation


@dataclass
class MaskKeys:
    """Draws masks, each by a key of its own.

    The first key of a step is drawn from the device's stream; the others follow it. A mask is named by where the
    stream stood, and moves it on: what is computed again from the same place (activation checkpointing) gets the same
    mask, and whoever sets the stream to a place of his own draws from there.

    Args:
        backend: of the tensors.
    """

    backend: Backend
    # By where the stream stood.
    _keys: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    # The key for the mask that is drawn next, and where the stream will stand then.
    _following: tuple[torch.Tensor, torch.Tensor] | None = None
    _after: int | None = None

    def mask(self, sizes: tuple[int, ...], keep: float) -> torch.Tensor:
        """A mask on the device, True where an element is kept.

        Args:
            sizes: of the mask, see `mask_computation`.
            keep: the probability of True.
        """
        state = self.backend.seed()
        key = self._keys.get(state)
        is_new = key is None
        if key is None and state == self._after:
            key = self._following
        if key is None:
            key = self._drawn()
        else:
            # Nobody reads it, so that it is not part of any graph; but the stream moves on.
            torch.rand((), device=self.backend.device())
        mask, following = self.backend.call(mask_computation(sizes, keep), key)
        if is_new:
            self._keys[state] = key
            self._following, self._after = (following, key[1]), self.backend.seed()
        return mask

    def _drawn(self) -> tuple[torch.Tensor, torch.Tensor]:
        words = torch.randint(0, 1 << 32, (2,), dtype=torch.int64, device=self.backend.device()).to(torch.uint32)
        return words[0], words[1]
