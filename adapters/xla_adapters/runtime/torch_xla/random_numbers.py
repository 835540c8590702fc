"""`XLARandom`: torch_xla's random stream."""

from __future__ import annotations

import os
from functools import cached_property, wraps

import torch
import torch_xla
import torch_xla.core.xla_model as xm

from xla_adapters.errors import ConfigError
from xla_adapters.runtime.interface import Device, Tracing

_C = torch_xla._XLAC
# Constants of their rounds (Salmon et al.: Parallel Random Numbers: As Easy as 1, 2, 3, 2011); a lowered operation
# of the device's own algorithm has neither.
_ALGORITHMS = {"philox": "constant(2654435769)", "three_fry": "constant(466688986)"}
# Seeds of torch may have 64 bits, those of torch_xla are signed.
_BITS = (1 << 63) - 1


def seed_with_torch(*, had_started: bool) -> None:
    """From now on `torch.manual_seed` and `torch.seed` seed the device's stream, as they seed those of other devices.

    Args:
        had_started: whether the runtime had started before. If not, the seed that torch has already been given counts.
    """
    stock = torch.random._seed_custom_device
    process = os.getpid()

    @wraps(stock)
    def seed_custom_device(seed: int) -> None:
        stock(seed)
        # A worker of a data loader may be a fork of this process, in which the runtime cannot be used.
        if os.getpid() == process:
            xm.set_rng_state(seed & _BITS)

    torch.random._seed_custom_device = seed_custom_device
    if not had_started and torch.initial_seed() != torch.Generator().initial_seed():
        xm.set_rng_state(torch.initial_seed() & _BITS)


class XLARandom:
    """`Random` on torch_xla, whose algorithm is chosen when the process lowers its first random operation.

    Args:
        device: of the stream.
        tracing: to lower an operation without executing it.
    """

    algorithm_variable = "XLA_RNG_BIT_GENERATOR"

    def __init__(self, device: Device, tracing: Tracing) -> None:
        self._device = device
        self._tracing = tracing
        self._algorithm: str | None = None

    @cached_property
    def _device_name(self) -> str:
        return str(self._device.torch_device())

    def seed(self) -> int:
        """See `Random`."""
        return int(xm.get_rng_state())

    def set_seed(self, seed: int) -> None:
        """See `Random`."""
        xm.set_rng_state(seed)

    def position(self) -> int:
        """See `Random`."""
        return self.seed()

    def is_at(self, position: int) -> bool:
        """See `Random`."""
        return self.seed() == position

    def go_to(self, position: int) -> None:
        """See `Random`."""
        self.set_seed(position)

    def seed_input(self) -> torch.Tensor:
        """See `Random`."""
        seed: torch.Tensor = _C._get_base_seed_as_tensor(self._device_name)
        return seed

    def seed_number(self) -> int:
        """See `Random`."""
        return int(_C._get_seed_info_id())

    def ask_for_algorithm(self, name: str) -> str | None:
        """See `Random`; sets the variable while an operation is lowered, and takes it away again."""
        given = os.environ.get(self.algorithm_variable)
        known = ("default", *_ALGORITHMS)
        if given is not None and given not in known:
            raise ConfigError(
                f"{self.algorithm_variable}={given!r} is not a valid value; valid values: {', '.join(known)}"
            )
        if given is None:
            os.environ[self.algorithm_variable] = name
            try:
                self.algorithm()
            finally:
                del os.environ[self.algorithm_variable]
        return given

    def algorithm(self) -> str:
        """See `Random`; read off a lowered operation."""
        if self._algorithm is not None:
            return self._algorithm
        seed, eager = self.seed(), self._tracing.eager()
        self._tracing.set_eager(False)
        try:
            drawn = torch.rand(1, device=self._device.torch_device())
            text = str(_C._get_xla_tensors_hlo([drawn]))
        finally:
            self._tracing.set_eager(eager)
            self.set_seed(seed)
        del drawn
        self._algorithm = next((name for name, sign in _ALGORITHMS.items() if sign in text), "default")
        return self._algorithm
