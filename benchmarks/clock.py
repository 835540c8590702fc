"""`Clock`: what the steps of a run cost, between the pauses in which other runs have their turn."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.turns import PassOn
from xla_adapters import get_backend
from xla_adapters.backend import Metrics


@dataclass(frozen=True)
class Plan:
    """How many steps.

    Attributes:
        warmup: before anything is timed; what is compiled should be compiled in these.
        steps: of a block.
        rounds: blocks.
    """

    warmup: int = 8
    steps: int = 10
    rounds: int = 5

    @property
    def total(self) -> int:
        """All steps of a run."""
        return self.warmup + self.steps * self.rounds


@dataclass
class Timing:
    """One run. Milliseconds are per step, medians over the blocks.

    Attributes:
        host_ms: CPU of the main thread.
        process_ms: CPU of all threads.
        wall_ms: on the wall.
        blocks: the three of each block.
        first_step_seconds, first_step_cpu_seconds: from the start of the clock to the end of the first step.
        warmup_seconds: to the end of the warm-up.
        compiles, compile_seconds: of graphs, from the start of the clock to the end of the last block.
        compiles_while_timed: of them, in the blocks.
        executions: per step of the blocks.
        warmup_peak_mb, steps_peak_mb: the most memory the process had, above what it began with.
        losses: of each step, or their mean.
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
    warmup_peak_mb: float = 0.0
    steps_peak_mb: float = 0.0
    losses: list[float] = field(default_factory=list)

    @property
    def mean_loss(self) -> float | None:
        """Over all steps."""
        return statistics.mean(self.losses) if self.losses else None


class Clock:
    """Told of the end of each step; begins when it is made.

    Args:
        plan: how many there will be.
        pass_on: lets other runs have their turn.
        wait: blocks until everything that was begun is computed.
        xla: whether torch_xla's counters are read.
    """

    def __init__(self, plan: Plan, pass_on: PassOn, wait: Callable[[], None], *, xla: bool = True) -> None:
        self.plan = plan
        self._pass_on = pass_on
        self._wait = wait
        self._read: Callable[[], Metrics] | None = get_backend().metrics if xla else None
        self._done = 0
        self._blocks: list[tuple[float, float, float]] = []
        self._metrics = [self._read()] if self._read else []
        self._memory = _Peak()
        self._peaks: list[float] = []
        self._start = self._began = _now()
        self._first = self._warm = self._start

    def step_done(self) -> None:
        """A step has ended."""
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
        self._pass_on()
        self._began = _now()

    def timing(self, losses: Sequence[float]) -> Timing:
        """What was measured."""
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
            made.executions = (end.executions - warm.executions) / (self.plan.steps * self.plan.rounds)
        return made


def _now() -> tuple[float, float, float]:
    return time.thread_time(), time.process_time(), time.perf_counter()


class _Peak:
    """The most memory this process had, above what it had when this was made; Linux can begin anew."""

    _REFS = Path("/proc/self/clear_refs")

    def __init__(self) -> None:
        self._begin_anew()
        self._base = self._most()

    def taken(self) -> float:
        """Megabytes, since the last time this was asked."""
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
