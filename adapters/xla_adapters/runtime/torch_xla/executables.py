"""`XLAExecutables`: torch_xla's executables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
import torch_xla
import torch_xla.core.xla_model as xm

from xla_adapters.runtime.interface import Device
from xla_adapters.runtime.interface.executables import GraphInput
from xla_adapters.runtime.torch_xla.cached_graphs import CachedGraphs

_C = torch_xla._XLAC
# How torch_xla moves its random stream on at the end of a step (`DeviceContextArena::MarkStep`).
_SEED_FACTOR, _SEED_SHIFT, _SEED_MASK = 7012063, 1012031, (1 << 64) - 1


class XLAExecutables:
    """`Executables` on torch_xla's cache of compiled graphs.

    Args:
        device: of the executables.
        graphs: compiles and runs graphs.
    """

    def __init__(self, device: Device, graphs: CachedGraphs) -> None:
        self._device = device
        self._graphs = graphs
        self._run_graph = graphs.run

    @cached_property
    def _device_name(self) -> str:
        return str(self._device.torch_device())

    def inputs(self, outputs: Sequence[torch.Tensor]) -> list[GraphInput]:
        """See `Executables`."""
        return self._graphs.inputs(outputs)

    def text(self, outputs: Sequence[torch.Tensor]) -> bytes:
        """See `Executables`."""
        return self._graphs.text(outputs)

    def name(self, outputs: Sequence[torch.Tensor], donated: Sequence[torch.Tensor]) -> bytes:
        """See `Executables`."""
        return self._graphs.name(outputs, donated)

    def compile(self, outputs: Sequence[torch.Tensor], donated: Sequence[torch.Tensor]) -> bytes:
        """See `Executables`."""
        return self._graphs.compile(outputs, donated)

    def run(
        self, name: bytes, inputs: Sequence[torch.Tensor], *, taken: Sequence[torch.Tensor] = ()
    ) -> list[torch.Tensor]:
        """See `Executables`."""
        return self._run_graph(name, inputs, taken=taken)

    def finish_run(self) -> None:
        """See `Executables`."""
        seed = _C._xla_get_rng_seed()
        _C._xla_set_rng_seed((_SEED_SHIFT + seed * _SEED_FACTOR) & _SEED_MASK, self._device_name)
        if xm.is_master_ordinal():
            xm.ms.save_metrics()
        xm._run_step_closures()
