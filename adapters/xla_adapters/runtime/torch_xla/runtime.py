"""`make_runtime`: the runtime interface on torch_xla 2.9, put together from the objects of this folder.

Calls into `torch_xla._XLAC` are private; `tests/contract` pins each one.
"""

from __future__ import annotations

from xla_adapters.runtime.interface import Runtime
from xla_adapters.runtime.torch_xla.abstract_tensors import XLAAbstractTensors
from xla_adapters.runtime.torch_xla.cached_graphs import CachedGraphs
from xla_adapters.runtime.torch_xla.counters import XLACounters
from xla_adapters.runtime.torch_xla.custom_kernels import XLACustomKernels
from xla_adapters.runtime.torch_xla.device import XLADevice
from xla_adapters.runtime.torch_xla.executables import XLAExecutables
from xla_adapters.runtime.torch_xla.lazy_tensors import XLALazyTensors
from xla_adapters.runtime.torch_xla.random_numbers import XLARandom
from xla_adapters.runtime.torch_xla.self_test import why_no_replay
from xla_adapters.runtime.torch_xla.shared_buffers import XLASharedBuffers
from xla_adapters.runtime.torch_xla.spmd import XLASpmd
from xla_adapters.runtime.torch_xla.tracing import XLATracing
from xla_adapters.runtime.torch_xla.transfers import XLATransfers
from xla_adapters.runtime.torch_xla.values import XLAValues


def make_runtime() -> Runtime:
    """The runtime of this process; starts nothing yet."""
    device, counters = XLADevice(), XLACounters()
    tracing = XLATracing(device)
    transfers = XLATransfers(device, tracing)
    executables = XLAExecutables(device, tracing, counters, CachedGraphs())
    values = XLAValues(device, tracing, executables)
    lazy = XLALazyTensors(device, transfers, values)
    return Runtime(
        name="torch_xla",
        dynamo_backend="openxla",
        device=device,
        transfers=transfers,
        tracing=tracing,
        values=values,
        executables=executables,
        random=XLARandom(device, tracing),
        counters=counters,
        why_no_replay=why_no_replay,
        spmd=XLASpmd(device, tracing, transfers),
        lazy=lazy,
        shared_buffers=XLASharedBuffers(device, tracing, values, lazy),
        custom_kernels=XLACustomKernels(tracing),
        abstract=XLAAbstractTensors(),
    )
