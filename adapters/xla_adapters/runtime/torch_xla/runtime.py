"""`make_runtime`: the runtime interface on torch_xla 2.9, put together from the objects of this folder.

Calls into `torch_xla._XLAC` are private; `tests/contract` pins each one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch_xla
from torch_xla.core.xla_builder import Shape, Type

from xla_adapters.runtime.interface import Runtime
from xla_adapters.runtime.torch_xla.cached_graphs import CachedGraphs
from xla_adapters.runtime.torch_xla.counters import XLACounters
from xla_adapters.runtime.torch_xla.custom_kernels import XLACustomKernels
from xla_adapters.runtime.torch_xla.device import XLADevice
from xla_adapters.runtime.torch_xla.executables import XLAExecutables
from xla_adapters.runtime.torch_xla.lazy_tensors import XLALazyTensors
from xla_adapters.runtime.torch_xla.patches import warn_by_its_logger
from xla_adapters.runtime.torch_xla.random_numbers import XLARandom
from xla_adapters.runtime.torch_xla.shared_buffers import XLASharedBuffers
from xla_adapters.runtime.torch_xla.spmd import XLASpmd
from xla_adapters.runtime.torch_xla.tracing import XLATracing
from xla_adapters.runtime.torch_xla.transfers import XLATransfers
from xla_adapters.runtime.torch_xla.values import XLAValues

_C = torch_xla._XLAC
_TYPES = {
    torch.float32: Type.F32,
    torch.float64: Type.F64,
    torch.bfloat16: Type.BF16,
    torch.float16: Type.F16,
    torch.int64: Type.S64,
    torch.int32: Type.S32,
    torch.int16: Type.S16,
    torch.int8: Type.S8,
    torch.uint8: Type.U8,
    torch.bool: Type.PRED,
    torch.complex64: Type.C64,
}


def make_runtime() -> Runtime:
    """The runtime of this process; starts nothing yet."""
    warn_by_its_logger()
    device, counters = XLADevice(), XLACounters()
    tracing = XLATracing(device)
    transfers = XLATransfers(device, tracing)
    executables = XLAExecutables(device, CachedGraphs())
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


# ---- self-test ------------------------------------------------------------------------------------


def why_no_replay(runtime: Runtime) -> str | None:
    """Compiles two tiny graphs and runs one of them again; see `Runtime`."""
    if _runs_cached_graphs(runtime):
        return None
    return f"torch_xla {torch_xla.__version__} does not run cached graphs as 2.9 does"


def _runs_cached_graphs(runtime: Runtime) -> bool:
    tracing, transfers, executables = runtime.tracing, runtime.transfers, runtime.executables
    lazy, values, counters = runtime.lazy, runtime.values, runtime.counters
    eager = tracing.eager()
    tracing.set_eager(False)
    try:
        state, batch = transfers.to_device(torch.arange(3.0)), transfers.to_device(torch.ones(3))
        tracing.flush()
        before = lazy.inner(state)
        alias, (own, given) = state.view(3), lazy.handles([state, batch])
        state.mul_(1.5).add_(batch)
        output = lazy.inner(state)
        inputs = executables.inputs([output])
        kinds = [{own: "state", given: "batch"}.get(item.handle, "number") for item in inputs]
        if sorted(kinds) != ["batch", "number", "state"]:
            return False
        name = executables.compile([output], [before])
        lazy.fill([output], executables.run(name, [item.value for item in inputs]))
        compiled = counters.compile_totals()[0]
        names, writes = lazy.storage_marks([state])
        for factor in (2.0, 3.0):
            (number,) = transfers.upload_numbers([(factor, torch.float32)])
            feed = {"state": state, "batch": batch, "number": number}
            values.write([state], executables.run(name, [feed[kind] for kind in kinds]))
        if counters.compile_totals()[0] != compiled:
            return False
        expected = ((torch.arange(3.0) * 1.5 + 1) * 2 + 1) * 3 + 1
        found = transfers.to_host([state, alias])
        values.write([alias], [batch])
        told = lazy.storage_marks([state]) == (names, [writes[0] + 3])
        return told and all(torch.equal(value, expected) for value in found)
    except (AttributeError, RuntimeError, TypeError, KeyError):
        return False
    finally:
        tracing.set_eager(eager)


# ---- tensors without memory -----------------------------------------------------------------------


class XLAAbstractTensors:
    """`AbstractTensors` on torch_xla."""

    def prepare(self) -> None:
        """See `AbstractTensors`; a CPU is always there."""

    def placeholder(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See `AbstractTensors`."""
        found: torch.Tensor = _C._xla_create_placeholder_tensor(Shape.create(_TYPES[dtype], tuple(shape)).shape)
        return found

    def lower(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> tuple[bytes, list[int | None]]:
        """See `AbstractTensors`."""
        context = _C.lowering.LoweringContext("step")
        context.build(list(outputs))
        numbers = [context.tensor_parameter_id(tensor) for tensor in inputs]
        return bytes(context.hlo()), [number if number >= 0 else None for number in numbers]
