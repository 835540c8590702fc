"""`count`: counts compiles, executions and transfers of a block of code."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from xla_adapters.runtime import get_runtime


@dataclass(kw_only=True)
class StepCounters:
    """The counts of a `with count()` block, valid after its exit.

    Attributes:
        compiles: number of graphs compiled, without eager operations.
        executions: number of graphs executed, without eager operations.
        transfers_to_host, transfers_to_device: number of copies between device and host.
        eager_ops: number of operations executed eagerly.
        eager_compiles: number of eager operations compiled.
        loads: number of programs of both kinds that were loaded from the compile cache instead of being compiled.
        compile_seconds: time spent compiling and loading graphs.
        wall_seconds: elapsed time, including the wait for the device at both ends.
        host_seconds: CPU time of the calling thread.
    """

    compiles: int = 0
    executions: int = 0
    transfers_to_host: int = 0
    transfers_to_device: int = 0
    eager_ops: int = 0
    eager_compiles: int = 0
    loads: int = 0
    compile_seconds: float = 0.0
    wall_seconds: float = 0.0
    host_seconds: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """The counts by name."""
        return asdict(self)


@contextmanager
def count() -> Iterator[StepCounters]:
    """Counts what happens on the device inside the context.

    It waits for the device at both ends, so do not use it inside a step.

    Yields:
        The counts. They are filled in at the exit, also if the block raises.
    """
    runtime = get_runtime()
    counters = StepCounters()
    before = runtime.counters.metrics()
    wall, host = time.perf_counter(), time.thread_time()
    try:
        yield counters
    finally:
        counters.host_seconds = time.thread_time() - host
        vars(counters).update(runtime.counters.metrics().since(before))
        counters.wall_seconds = time.perf_counter() - wall
