"""`TPUTransfers`: copies between host and device by TorchTPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from xla_adapters.runtime.interface import Device
from xla_adapters.runtime.interface.tensors import tell_copy
from xla_adapters.runtime.torch_tpu.counters import TPUCounters


class TPUTransfers:
    """`Transfers` on TorchTPU. A copy is a buffer of its own at once, so nothing waits to be copied with another.

    Args:
        device: where tensors are copied to and from.
        counters: count the transfers.
    """

    def __init__(self, device: Device, counters: TPUCounters) -> None:
        self._device = device
        self._counters = counters

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Transfers`."""
        self._counters.to_device += 1
        return tensor.detach().to(self._device.torch_device())

    def upload_numbers(self, numbers: Sequence[tuple[float, torch.dtype]]) -> list[torch.Tensor]:
        """See `Transfers`."""
        return [self.to_device(torch.tensor(value, dtype=dtype)) for value, dtype in numbers]

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `Transfers`."""
        if any(self._device.owns(tensor) for tensor in tensors):
            self._counters.to_host += 1
            tell_copy(tensors)
        return [tensor.detach().to("cpu") for tensor in tensors]

    def piggy_back(self, tensors: Sequence[torch.Tensor], receive: Callable[[list[torch.Tensor]], None]) -> None:
        """See `Transfers`; copies at once."""
        receive(self.to_host(tensors))

    def deliver_piggy_backed(self) -> None:
        """See `Transfers`; nothing waits."""
