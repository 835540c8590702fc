"""`StepCounters`: what a stretch of code cost in compiles, executions and transfers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from xla_adapters.backend import Metrics, get_backend


@dataclass(kw_only=True)
class StepCounters:
    """Counts between the entry and the exit of `count()`.

    Attributes:
        compiles: graphs compiled (eager operations not among them).
        executions: graphs executed (eager operations not among them).
        transfers_to_host, transfers_to_device: copies between device and host.
        eager_ops, eager_compiles: operations executed one by one, and compiled for it.
        compile_seconds: time spent compiling graphs.
        wall_seconds: elapsed time, the wait for the device at both ends included.
        host_seconds: CPU time of the calling thread.
    """

    compiles: int = 0
    executions: int = 0
    transfers_to_host: int = 0
    transfers_to_device: int = 0
    eager_ops: int = 0
    eager_compiles: int = 0
    compile_seconds: float = 0.0
    wall_seconds: float = 0.0
    host_seconds: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """The counts by name."""
        return asdict(self)

    def _measure(self, before: Metrics, after: Metrics) -> None:
        self.compiles = after.compiles - before.compiles
        self.executions = after.executions - before.executions
        self.transfers_to_host = after.transfers_to_host - before.transfers_to_host
        self.transfers_to_device = after.transfers_to_device - before.transfers_to_device
        self.eager_ops = after.eager_ops - before.eager_ops
        self.eager_compiles = after.eager_compiles - before.eager_compiles
        self.compile_seconds = after.compile_seconds - before.compile_seconds


@contextmanager
def count() -> Iterator[StepCounters]:
    """Counts what happens on the device inside the context.

    The device is waited for at both ends: do not open it inside a step. The numbers are filled in
    at the exit, also when the body raises.
    """
    backend = get_backend()
    counters = StepCounters()
    before = backend.metrics()
    wall, host = time.perf_counter(), time.thread_time()
    try:
        yield counters
    finally:
        counters.host_seconds = time.thread_time() - host
        counters._measure(before, backend.metrics())
        counters.wall_seconds = time.perf_counter() - wall
