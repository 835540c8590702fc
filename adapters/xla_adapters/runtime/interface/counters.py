"""`Counters`: how often the runtime compiled, executed and transferred."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Running totals since the process started. Times are in seconds."""

    compiles: int
    compile_seconds: float
    executions: int
    transfers_to_host: int
    transfers_to_device: int
    eager_compiles: int
    eager_ops: int

    def since(self, before: Metrics) -> dict[str, Any]:
        """What was added after `before`, by name."""
        return {name: total - getattr(before, name) for name, total in vars(self).items()}


class CompiledMemory(NamedTuple):
    """The memory that an executable needs on a device, by kind, in bytes; from the compiler's own analysis.

    Attributes:
        inputs, outputs: what it reads and returns.
        aliased: the part of the outputs that lies where inputs were.
        temporaries: values between its operations.
        code: the executable itself; 0 on CPU devices.
    """

    inputs: int
    outputs: int
    aliased: int
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        """All of it at once."""
        return self.inputs + self.outputs - self.aliased + self.temporaries + self.code


class Counters(Protocol):
    """Counts what the runtime did since the process started."""

    def metrics(self) -> Metrics:
        """All totals. Waits for the device, since an execution is counted when it ends."""

    def compile_totals(self) -> tuple[int, float]:
        """Graphs compiled and the seconds that took. Does not wait, and leaves out single eager operations."""

    def executables_compiled(self) -> int:
        """Executables compiled, those of single eager operations too. Cheap: asked at each replayed call."""

    def compile_cache(self) -> dict[str, int]:
        """How often a compile found its executable in the persistent cache (`hits`), did not (`misses`), or found one
        that could not be loaded (`failures`)."""

    def compiled_memory(self) -> list[CompiledMemory]:
        """What each executable needs that was compiled since the last call; empty where the runtime does not tell."""

    def host_operators(self) -> dict[str, int]:
        """How often each operator was computed on the host, for which the runtime has no kernel on the device."""

    def executables_kept(self) -> int:
        """How many executables the runtime keeps; with one more it forgets the one that was not used for longest."""
