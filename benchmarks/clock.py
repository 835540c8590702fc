"""`Clock`: times the steps of a run, in blocks between which other runs compute (`benchmarks.interleaved`)."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.interleaved import Pause
from xla_adapters import get_runtime
from xla_adapters.runtime import Metrics


@dataclass(frozen=True)
class Plan:
    """The number of steps of a run.

    Attributes:
        warmup: steps before the first block; all compiling should happen in these.
        steps: steps per block.
        rounds: number of blocks.
    """

    warmup: int = 8
    steps: int = 10
    rounds: int = 5

    @property
    def total(self) -> int:
        """The total number of steps of a run."""
        return self.warmup + self.steps * self.rounds


@dataclass
class Timing:
    """The result of one run. Milliseconds are per step, medians over the blocks.

    Attributes:
        host_ms: CPU time of the main thread.
        process_ms: CPU time of all threads.
        wall_ms: wall time.
        blocks: (host, process, wall) of each block.
        first_step_seconds, first_step_cpu_seconds: from the start of the clock to the end of the first step.
        warmup_seconds: from the start of the clock to the end of the warm-up.
        compiles, compile_seconds: of graphs, from the start of the clock to the end of the last block.
        compiles_while_timed: graphs compiled in the blocks.
        executions: per step of the blocks.
        transfers: copies to the device per step of the blocks, beside the tensors of the batch.
        warmup_peak_mb, steps_peak_mb: peak memory of the process above its memory at the start, in MiB.
        losses: the loss of each step, or only their mean.
    """

    host_ms: float
    process_ms: float
    wall_ms: float
    blocks: list[tuple[float, float, float]]
    first_step_seconds: float
    first_step_cpu_seconds: float
    warmup_seconds: float
    compiles: int | None = None
    compile_seconds: float | None = None
    compiles_while_timed: int | None = None
    executions: float | None = None
    transfers: float | None = None
    warmup_peak_mb: float = 0.0
    steps_peak_mb: float = 0.0
    losses: list[float] = field(default_factory=list)

    @property
    def mean_loss(self) -> float | None:
        """The mean loss of all steps."""
        return statistics.mean(self.losses) if self.losses else None


class Clock:
    """Times steps. It starts when it is created, and must be told of the end of each step.

    Args:
        plan: the number of steps.
        pause: called after the warm-up and each block; other runs compute meanwhile.
        wait: waits for the device.
        xla: whether to read torch_xla's counters.
        batch_tensors: how many tensors of a batch are copied to the device in each step.
    """

    def __init__(
        self, plan: Plan, pause: Pause, wait: Callable[[], None], *, xla: bool = True, batch_tensors: int = 0
    ) -> None:
        self.plan = plan
        self._batch_tensors = batch_tensors
        self._pause = pause
        self._wait = wait
        self._read: Callable[[], Metrics] | None = get_runtime().counters.metrics if xla else None
        self._done = 0
        self._blocks: list[tuple[float, float, float]] = []
        self._metrics = [self._read()] if self._read else []
        self._memory = _Peak()
        self._peaks: list[float] = []
        self._start = self._began = _now()
        self._first = self._warm = self._start

    def step_done(self) -> None:
        """Must be called at the end of each step."""
        self._done += 1
        if self._done == 1:
            self._wait()
            self._first = _now()
        behind = self._done - self.plan.warmup
        if behind < 0 or behind % self.plan.steps or self._done > self.plan.total:
            return
        self._wait()
        now = _now()
        if behind == 0:
            self._warm = now
        else:
            spent = [1000 * (after - before) / self.plan.steps for before, after in zip(self._began, now, strict=True)]
            self._blocks.append((spent[0], spent[1], spent[2]))
        if self._read and self._done in (self.plan.warmup, self.plan.total):
            self._metrics.append(self._read())
        if self._done in (self.plan.warmup, self.plan.total):
            self._peaks.append(self._memory.taken())
        self._pause()
        self._began = _now()

    def timing(self, losses: Sequence[float]) -> Timing:
        """The result, after the last step."""
        if len(self._blocks) != self.plan.rounds:
            raise RuntimeError(f"{self._done} steps were done, of {self.plan.total}")
        host, process, wall = (statistics.median(block[kind] for block in self._blocks) for kind in range(3))
        made = Timing(
            host,
            process,
            wall,
            self._blocks,
            first_step_seconds=self._first[2] - self._start[2],
            first_step_cpu_seconds=self._first[1] - self._start[1],
            warmup_seconds=self._warm[2] - self._start[2],
            warmup_peak_mb=self._peaks[0],
            steps_peak_mb=self._peaks[1],
            losses=list(losses),
        )
        if self._metrics:
            start, warm, end = self._metrics
            made.compiles = end.compiles - start.compiles
            made.compile_seconds = end.compile_seconds - start.compile_seconds
            made.compiles_while_timed = end.compiles - warm.compiles
            steps = self.plan.steps * self.plan.rounds
            made.executions = (end.executions - warm.executions) / steps
            made.transfers = (end.transfers_to_device - warm.transfers_to_device) / steps - self._batch_tensors
        return made


def _now() -> tuple[float, float, float]:
    return time.thread_time(), time.process_time(), time.perf_counter()


class _Peak:
    """Peak memory of this process above that at creation; on Linux the peak is reset by each `taken()`."""

    _REFS = Path("/proc/self/clear_refs")

    def __init__(self) -> None:
        self._begin_anew()
        self._base = self._most()

    def taken(self) -> float:
        """The peak in MiB since the last call."""
        found = self._most() - self._base
        self._begin_anew()
        return found

    def _begin_anew(self) -> None:
        if self._REFS.exists():
            self._REFS.write_text("5")

    def _most(self) -> float:
        if self._REFS.exists():
            (line,) = [text for text in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in text]
            return int(line.split()[1]) / 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
