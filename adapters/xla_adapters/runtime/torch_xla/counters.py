"""`XLACounters`: torch_xla's metrics as totals, and the memory that each executable needs.

No call of torch_xla 2.9 returns that memory. `PT_XLA_DEBUG_LEVEL=1` has it written to `PT_XLA_DEBUG_FILE`, at compiles
only.
"""

from __future__ import annotations

import logging
import os
import re

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as xla_metrics

from xla_adapters.runtime.compile_cache import COMPILE_CACHE, CacheCounts, CompilesAndLoads
from xla_adapters.runtime.interface import CompiledMemory, Metrics

logger = logging.getLogger("xla_adapters")

_FILE, _LEVEL = "PT_XLA_DEBUG_FILE", "PT_XLA_DEBUG_LEVEL"
# Inherited from a process that started this one.
_OURS = re.compile(r"/proc/\d+/fd/\d+")
# Its GB are of 1024 each; six digits of them are whole KiB, nearly.
_GIGABYTE = 1 << 30
_NUMBERS = re.compile(
    r"Graph input size: (\S+) GB.*?Graph output size: (\S+) GB.*?Aliased Input size: (\S+) GB.*?"
    r"Intermediate tensor size: (\S+) GB.*?Compiled program size: (\S+) GB",
    re.DOTALL,
)
_NANOSECONDS = 1e-9
# torch_xla counts each operator that it computes on the host under the operator's name.
_TORCHS = "aten::"
_READ = "aten::_local_scalar_dense"
# torch_xla forgets executables, the least recently used first, when it has this many.
_EXECUTABLES = 2048


class XLACounters:
    """`Counters` on torch_xla's metrics."""

    def __init__(self) -> None:
        self._split = CompilesAndLoads(_in_order)

    def metrics(self) -> Metrics:
        """See `Counters`."""
        wait()
        graphs, seconds = self.compile_totals()
        eager = _samples("EagerOpCompileTime")
        compiles, eager_compiles, loads = self._split(graphs, eager, self.compile_cache().loaded)
        return Metrics(
            compiles=compiles,
            compile_seconds=seconds,
            executions=_samples("ExecuteTime") + _samples("ExecuteReplicatedTime"),
            transfers_to_host=_samples("TransferFromDeviceTime"),
            transfers_to_device=_samples("TransferToDeviceTime"),
            eager_compiles=eager_compiles,
            eager_ops=_samples("EagerOpExecuteTime"),
            loads=loads,
        )

    def compile_totals(self) -> tuple[int, float]:
        """See `Counters`."""
        data = xla_metrics.metric_data("CompileTime")
        return (0, 0.0) if data is None else (int(data[0]), float(data[1]) * _NANOSECONDS)

    def executables_compiled(self) -> int:
        """See `Counters`."""
        data = (xla_metrics.metric_data(name) for name in ("CompileTime", "EagerOpCompileTime"))
        return sum(int(item[0]) for item in data if item is not None)

    def compile_cache(self) -> CacheCounts:
        """See `Counters`."""
        return COMPILE_CACHE.counts()

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


def has_started() -> bool:
    """Whether the runtime has started."""
    return bool(torch_xla._XLAC._xla_get_spmd_config_is_locked())


def wait() -> None:
    """Waits for the device. A runtime that has not started stays so: it would start without SPMD and compile cache."""
    if has_started():
        xm.wait_device_ops()


def _in_order(graphs: int, eager: int) -> list[bool]:
    """Of the last compiles, by the times that torch_xla notes, whether each was a graph; fewer, if it noted fewer."""
    found = []
    for metric, number, is_graph in (("CompileTime", graphs, True), ("EagerOpCompileTime", eager, False)):
        data = xla_metrics.metric_data(metric)
        found += [(when, is_graph) for when, _ in (data[2][-number:] if data is not None else [])]
    return [is_graph for _, is_graph in sorted(found)]


def _samples(metric: str) -> int:
    data = xla_metrics.metric_data(metric)
    return 0 if data is None else int(data[0])


# ---- the memory of executables --------------------------------------------------------------------


class CompileMemory:
    """Reads what torch_xla writes. Call `start` before the runtime starts."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._read = 0

    def start(self) -> None:
        """Has it written to memory, unless the user looks at what torch_xla writes.

        It leaves out what torch_xla prints of each execution that a step refuses, too: twelve lines without its cause.
        """
        if self._file is not None:
            return
        inherited = _OURS.fullmatch(os.environ.get(_FILE, "")) is not None
        if not inherited and any(os.environ.get(name) for name in ("PT_XLA_DEBUG", _LEVEL, _FILE)):
            return
        self._file = os.memfd_create("xla-adapters")
        os.environ[_FILE], os.environ[_LEVEL] = f"/proc/{os.getpid()}/fd/{self._file}", "1"
        logger.info(
            "%s and %s are set: what torch_xla says of each compile is kept for the report of the run. Set one of the "
            "variables yourself to see it",
            _FILE,
            _LEVEL,
        )

    def new(self) -> list[CompiledMemory]:
        """Of each executable compiled since the last call; empty where it is not known."""
        if self._file is None:
            return []
        size = os.fstat(self._file).st_size
        if size == self._read:
            return []
        text = os.pread(self._file, size - self._read, self._read).decode(errors="replace")
        self._read = size
        return [
            CompiledMemory(*(round(float(number) * _GIGABYTE) for number in numbers))
            for numbers in _NUMBERS.findall(text)
        ]


COMPILE_MEMORY = CompileMemory()
