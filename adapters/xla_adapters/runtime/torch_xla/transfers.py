"""`XLATransfers`: copies between host and device by torch_xla."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch_xla

from xla_adapters.runtime.interface import Device, Tracing
from xla_adapters.runtime.interface.tensors import tell_copy
from xla_adapters.runtime.tile_assignment import put_together
from xla_adapters.runtime.torch_xla.spmd import tiles_of

_C = torch_xla._XLAC


class XLATransfers:
    """`Transfers` on torch_xla.

    Args:
        device: where tensors are copied to and from.
        tracing: executes what is pending before it is copied.
    """

    def __init__(self, device: Device, tracing: Tracing) -> None:
        self._device = device
        self._tracing = tracing
        self._piggy_backed: list[tuple[list[torch.Tensor], Callable[[list[torch.Tensor]], None], bool]] = []
        # `Spmd.gathering_on_host` replaces it in torch_xla.
        self._stock_get_cpu_tensors: Callable[..., Any] = _C._xla_get_cpu_tensors

    @cached_property
    def _device_name(self) -> str:
        return str(self._device.torch_device())

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Transfers`.

        `tensor.to("xla")` makes a constant of a scalar 0 or 1, and shares other scalars: what begins
        its life so and is updated in a step makes the first step another graph than the later ones.
        """
        copy: torch.Tensor = _C._xla_tensors_from_aten([tensor.detach()], [self._device_name], None)[0]
        return copy

    def upload_numbers(self, numbers: Sequence[tuple[float, torch.dtype]]) -> list[torch.Tensor]:
        """See `Transfers`."""
        if not numbers:
            return []
        hosts = [torch.tensor(value, dtype=dtype) for value, dtype in numbers]
        return list(_C._xla_tensors_from_aten(hosts, [self._device_name] * len(hosts), None))

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `Transfers`."""
        if not tensors or not self._piggy_backed:
            return self._copy_to_host(tensors)
        return self._copy_with_piggy_backed(tensors)

    def piggy_back(
        self, tensors: Sequence[torch.Tensor], receive: Callable[[list[torch.Tensor]], None], *, must_arrive: bool
    ) -> None:
        """See `Transfers`."""
        self._piggy_backed.append((list(tensors), receive, must_arrive))

    def deliver_piggy_backed(self, *, at_the_end: bool = False) -> None:
        """See `Transfers`."""
        if any(must_arrive or not at_the_end for *_, must_arrive in self._piggy_backed):
            self._copy_with_piggy_backed([])

    def _copy_with_piggy_backed(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        waiting, self._piggy_backed = self._piggy_backed, []
        copies = self._copy_to_host([*tensors, *(tensor for group, *_ in waiting for tensor in group)])
        rest = copies[len(tensors) :]
        for group, receive, _ in waiting:
            receive(rest[: len(group)])
            rest = rest[len(group) :]
        return copies[: len(tensors)]

    def _copy_to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if not tensors:
            return []
        tensors = [tensor.detach() for tensor in tensors]
        tell_copy(tensors)
        copies: list[torch.Tensor | None] = [None] * len(tensors)
        if self._device.is_spmd():
            if any(self._tracing.is_pending(tensor) for tensor in tensors):
                self._tracing.flush()
            self._device.wait()
            cut = [index for index, tensor in enumerate(tensors) if tiles_of(tensor) is not None]
            parts = [tensors[index] for index in cut]
            places = _C._get_local_shard_replica_and_indices(parts) if parts else []
            for index, shards, where in zip(cut, _C._get_local_shards(parts) if parts else [], places, strict=True):
                copies[index] = put_together(tensors[index], [shard for shard, _ in shards], where)
        missing = [index for index, copy in enumerate(copies) if copy is None]
        if missing:
            found = self._stock_get_cpu_tensors([tensors[index] for index in missing])
            for index, copy in zip(missing, found, strict=True):
                copies[index] = copy.detach()
        return [copy for copy in copies if copy is not None]
