"""`XLACounters`: torch_xla's metrics as totals."""

from __future__ import annotations

import os

import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as xla_metrics

from xla_adapters.runtime.interface import CompiledMemory, Metrics
from xla_adapters.runtime.torch_xla.compile_memory import COMPILE_MEMORY

_NANOSECONDS = 1e-9
# torch_xla counts each operator that it computes on the host under the operator's name.
_TORCHS = "aten::"
_READ = "aten::_local_scalar_dense"
# torch_xla forgets executables, the least recently used first, when it has this many.
_EXECUTABLES = 2048


class XLACounters:
    """`Counters` on torch_xla's metrics."""

    def metrics(self) -> Metrics:
        """See `Counters`."""
        xm.wait_device_ops()
        compiles, seconds = self.compile_totals()
        return Metrics(
            compiles=compiles,
            compile_seconds=seconds,
            executions=_samples("ExecuteTime") + _samples("ExecuteReplicatedTime"),
            transfers_to_host=_samples("TransferFromDeviceTime"),
            transfers_to_device=_samples("TransferToDeviceTime"),
            eager_compiles=_samples("EagerOpCompileTime"),
            eager_ops=_samples("EagerOpExecuteTime"),
        )

    def compile_totals(self) -> tuple[int, float]:
        """See `Counters`."""
        data = xla_metrics.metric_data("CompileTime")
        return (0, 0.0) if data is None else (int(data[0]), float(data[1]) * _NANOSECONDS)

    def executables_compiled(self) -> int:
        """See `Counters`."""
        data = (xla_metrics.metric_data(name) for name in ("CompileTime", "EagerOpCompileTime"))
        return sum(int(item[0]) for item in data if item is not None)

    def compile_cache(self) -> dict[str, int]:
        """See `Counters`."""
        names = {"hits": "Hit", "misses": "Miss", "failures": "DeserializeFailure"}
        return {name: int(xla_metrics.counter_value(f"PersistentCache{own}") or 0) for name, own in names.items()}

    def compiled_memory(self) -> list[CompiledMemory]:
        """See `Counters`."""
        return COMPILE_MEMORY.new()

    def host_operators(self) -> dict[str, int]:
        """See `Counters`; a read by `.item()` is none."""
        names = xla_metrics.executed_fallback_ops()
        return {
            name.removeprefix(_TORCHS): int(xla_metrics.counter_value(name) or 0) for name in names if name != _READ
        }

    def executables_kept(self) -> int:
        """See `Counters`."""
        return int(os.environ.get("XLA_COMPILATION_CACHE_SIZE", _EXECUTABLES))


def _samples(metric: str) -> int:
    data = xla_metrics.metric_data(metric)
    return 0 if data is None else int(data[0])
