"""Tensors of TorchTPU: `TPUTransfers`, `TPUValues` and `TPUAbstractTensors`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch_tpu._internal.compile import tpu_torch_compile as _compiler
from torch_tpu._internal.utils import hardware as _hardware

from xla_adapters.open_step import in_step
from xla_adapters.runtime.interface import Device
from xla_adapters.runtime.interface.tensors import tell_copy
from xla_adapters.runtime.torch_tpu.counters import TPUCounters
from xla_adapters.runtime.torch_tpu.tracing import TPUTracing


class TPUTransfers:
    """`Transfers` on TorchTPU. Tensors are copied one by one, and inside a step none.

    Args:
        device: where tensors are copied to and from.
        counters: count the transfers.
    """

    def __init__(self, device: Device, counters: TPUCounters) -> None:
        self._device = device
        self._counters = counters
        self._waiting: list[tuple[list[torch.Tensor], Callable[[list[torch.Tensor]], None], bool]] = []

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Transfers`."""
        self._counters.to_device += 1
        return tensor.detach().to(self._device.torch_device())

    def upload_numbers(self, numbers: Sequence[tuple[float, torch.dtype]]) -> list[torch.Tensor]:
        """See `Transfers`."""
        return [self.to_device(torch.tensor(value, dtype=dtype)) for value, dtype in numbers]

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `Transfers`."""
        if not in_step():
            self.deliver_piggy_backed()
        if any(self._device.owns(tensor) for tensor in tensors):
            self._counters.to_host += 1
            tell_copy(tensors)
        return [tensor.detach().to("cpu") for tensor in tensors]

    def piggy_back(
        self, tensors: Sequence[torch.Tensor], receive: Callable[[list[torch.Tensor]], None], *, must_arrive: bool
    ) -> None:
        """See `Transfers`."""
        self._waiting.append((list(tensors), receive, must_arrive))

    def deliver_piggy_backed(self, *, at_the_end: bool = False) -> None:
        """See `Transfers`."""
        if at_the_end and not any(must_arrive for *_, must_arrive in self._waiting):
            return
        waiting, self._waiting = self._waiting, []
        for tensors, receive, _ in waiting:
            receive(self.to_host(tensors))


# ---- values ---------------------------------------------------------------------------------------


class TPUValues:
    """`Values` on TorchTPU.

    A step never writes into the buffer that a tensor had before it: there the tensor is a placeholder. So a snapshot
    of a tensor with a value copies nothing. One of a pending tensor is a clone, which costs the program nothing.

    Args:
        tracing: tells which tensors are pending.
    """

    def __init__(self, tracing: TPUTracing) -> None:
        self._tracing = tracing

    def snapshot(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Values`."""
        value = tensor.detach()
        if not self._tracing.is_pending(tensor):
            return value
        value = value.clone()
        assert self._tracing.traced is not None
        self._tracing.traced.add(value)
        return value

    def bring_up_to_date(self, tensor: torch.Tensor) -> None:
        """See `Values`; views are always up to date."""

    def second_copy(self, snapshot: torch.Tensor) -> torch.Tensor:
        """See `Values`."""
        return snapshot

    def rewrite(self, snapshot: torch.Tensor, second_copy: torch.Tensor) -> None:
        """See `Values`; nothing changes a snapshot."""

    def holds(self, tensor: torch.Tensor, snapshot: torch.Tensor, second_copy: torch.Tensor | None = None) -> bool:
        """See `Values`; nothing changes a snapshot."""
        same = tensor.untyped_storage()._cdata == snapshot.untyped_storage()._cdata
        return same and not self._tracing.is_pending(tensor)

    def restore(self, tensor: torch.Tensor, snapshot: torch.Tensor) -> None:
        """See `Values`; views made before the step keep the value from before the step."""
        tensor.data = snapshot

    def write(self, tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """See `Values`; only the tensors themselves see the value."""
        for tensor, value in zip(tensors, [value.detach() for value in values], strict=True):
            tensor.data = value

    def copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `Values`."""
        return [tensor.detach().clone() for tensor in tensors]


# ---- tensors without memory -----------------------------------------------------------------------


class TPUAbstractTensors:
    """`AbstractTensors` on TorchTPU."""

    def prepare(self) -> None:
        """See `AbstractTensors`; a plugin that `TPU_LIBRARY_PATH` names stands in for the device."""
        _hardware.get_tpu_device_count = lambda: 1
        _compiler.push_enable_tracebacks(True)

    def placeholder(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See `AbstractTensors`."""
        found: torch.Tensor = _compiler.placeholder(list(shape), dtype)
        return found

    def lower(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> tuple[bytes, list[int | None]]:
        """See `AbstractTensors`; each input is a parameter."""
        module = _compiler.build_mlir(list(outputs), list(inputs))
        text: str = _compiler.serialize_mlir_text(module, enable_debug_info=True)
        return text.encode(), list(range(len(inputs)))
