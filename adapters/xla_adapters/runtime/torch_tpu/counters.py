"""`TPUCounters`: TorchTPU's counts as totals."""

from __future__ import annotations

from torch_tpu._internal.device import _device_ops_backend as _backend

from xla_adapters.runtime.compile_cache import CacheCounts, CompilesAndLoads
from xla_adapters.runtime.interface import CompiledMemory, Device, Metrics
from xla_adapters.runtime.torch_tpu.device import TIERS


class TPUCounters:
    """`Counters` on TorchTPU, which counts single operations; compiles and runs of steps are counted here.

    Args:
        device: to wait for.

    Attributes:
        executions: runs of steps' executables.
        to_host, to_device: transfers that this package made; TorchTPU counts none.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.executions = self.to_host = self.to_device = 0
        self._compiles = 0
        self._seconds = 0.0
        self._split = CompilesAndLoads()

    def compiled(self, seconds: float) -> None:
        """Counts a compile."""
        self._compiles += 1
        TIERS.note_written()
        self._seconds += seconds

    def metrics(self) -> Metrics:
        """See `Counters`. TorchTPU's cache counts a step's compile as a request and a miss, too."""
        self._device.wait()
        TIERS.note_written()
        eager = int(_backend._get_cache_misses()) - self._compiles
        compiles, eager_compiles, loads = self._split(self._compiles, eager, self.compile_cache().loaded)
        return Metrics(
            compiles=compiles,
            compile_seconds=self._seconds,
            executions=self.executions,
            transfers_to_host=self.to_host,
            transfers_to_device=self.to_device,
            eager_compiles=eager_compiles,
            eager_ops=int(_backend._get_cache_requests()) - self._compiles,
            loads=loads,
        )

    def compile_totals(self) -> tuple[int, float]:
        """See `Counters`."""
        return self._compiles, self._seconds

    def executables_compiled(self) -> int:
        """See `Counters`."""
        return max(int(_backend._get_cache_misses()), self._compiles)

    def compile_cache(self) -> CacheCounts:
        """See `Counters`."""
        return TIERS.counts()

    def compiled_memory(self) -> list[CompiledMemory]:
        """See `Counters`; TorchTPU does not tell."""
        return []

    def host_operators(self) -> dict[str, int]:
        """See `Counters`; an operator without a kernel raises."""
        return {}

    def executables_kept(self) -> int:
        """See `Counters`; the package holds its executables itself, and forgets none."""
        return 1 << 30
