"""`TPURandom`: TorchTPU's random stream."""

from __future__ import annotations

import torch

from xla_adapters.errors import ConfigError
from xla_adapters.runtime.interface import Device
from xla_adapters.runtime.torch_tpu.placeholders import TPUPlaceholders

_WORD = 64
_MASK = (1 << _WORD) - 1


class TPURandom:
    """`Random` on TorchTPU. The state is two words of 64 bits, the seed and how far the stream is; here one integer.

    Args:
        device: of the stream.
        placeholders: hold the state.
    """

    algorithm_variable = "XLA_RNG_BIT_GENERATOR"

    def __init__(self, device: Device, placeholders: TPUPlaceholders) -> None:
        self._device = device
        self._placeholders = placeholders

    def seed(self) -> int:
        """See `Random`; reads from the device. The position in the stream is in the bits from 64 on."""
        low, high = self._placeholders.random_state().cpu().tolist()
        return int(low) | int(high) << _WORD

    def set_seed(self, seed: int) -> None:
        """See `Random`; takes what `seed` returned, too."""
        state = torch.tensor([seed & _MASK, seed >> _WORD], dtype=torch.uint64)
        self._placeholders.set_random_state(state.to(self._device.torch_device()))

    def position(self) -> torch.Tensor:
        """See `Random`."""
        return self._placeholders.stream_state()

    def is_at(self, position: torch.Tensor) -> bool:
        """See `Random`."""
        return self._placeholders.same_value(self._placeholders.stream_state(), position)

    def go_to(self, position: torch.Tensor) -> None:
        """See `Random`."""
        self._placeholders.set_stream_state(position)

    def seed_input(self) -> torch.Tensor:
        """See `Random`."""
        return self._placeholders.random_state()

    def seed_number(self) -> int:
        """See `Random`; inputs have no numbers."""
        return -1

    def algorithm(self) -> str:
        """See `Random`."""
        return "default"

    def ask_for_algorithm(self, name: str) -> str | None:
        """See `Random`; there is no choice.

        Raises:
            ConfigError: another algorithm than the device's own is asked for.
        """
        if name != "default":
            raise ConfigError(f"rng_algorithm={name!r}: torch_tpu draws with its own algorithm only; use 'default'")
        return None
