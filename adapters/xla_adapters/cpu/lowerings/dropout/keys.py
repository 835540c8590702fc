"""`MaskKeys`: gives each dropout mask of a step its own random key, from one draw of the device's random stream."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from xla_adapters.cpu.lowerings.dropout.masks import mask_computation
from xla_adapters.runtime.interface import Runtime

# Two words of the key, and the number of the mask: u32 scalars on the device.
_Name = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass
class MaskKeys:
    """Draws the dropout masks of one step.

    The first mask draws a key and a number from the device's stream; for the next ones the number is incremented. Masks
    are stored by the state of the stream, and each advances it. So a recomputation that resets the stream (activation
    checkpointing) gets the same mask, and after any other reset a new key is drawn.

    Args:
        runtime: the runtime.
    """

    runtime: Runtime
    # By state of the stream at the time of the draw.
    _names: dict[int, _Name] = field(default_factory=dict)

    def mask(self, sizes: tuple[int, ...], keep: float) -> torch.Tensor:
        """Draws a mask: a bool tensor on the device, True where an element is kept.

        Args:
            sizes: shape of the mask, see `mask_computation`.
            keep: the probability of True.
        """
        state = self.runtime.random.seed()
        name = self._names.get(state)
        if name is None:
            name = self._names[state] = self._drawn()
        else:
            # Advances the stream. The result is unused, so it is not part of the graph.
            torch.rand((), device=self.runtime.device.torch_device())
        mask, following = self.runtime.custom_kernels.call(mask_computation(sizes, keep), name)
        self._names.setdefault(self.runtime.random.seed(), (*name[:2], following))
        return mask

    def _drawn(self) -> _Name:
        words = torch.randint(0, 1 << 32, (3,), dtype=torch.int64, device=self.runtime.device.torch_device()).to(
            torch.uint32
        )
        return words[0], words[1], words[2]
