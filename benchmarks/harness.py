"""Runs several processes, of which one at a time computes, and times the steps of each.

Each run compiles once, and is then measured in blocks of steps that alternate with blocks of the other runs
(`run_interleaved`). So changes in the load of the machine affect all runs in the same way. A run tells its `Clock` of
each step.
"""

from __future__ import annotations

import functools
import os
import resource
import select
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.children import Child, Outcome
from xla_adapters import get_runtime
from xla_adapters.runtime import Metrics

# Called by a run to let the others compute; returns when it may continue.
Pause = Callable[[], None]


def run_interleaved(
    runs: Mapping[str, Callable[[Pause], Any]],
    rounds: int,
    *,
    timeout: float,
    say: Callable[[str], None],
) -> dict[str, Outcome]:
    """Runs functions in child processes, of which one at a time computes.

    Args:
        runs: functions by name; each must call its argument after the warm-up and after each block.
        rounds: number of blocks.
        timeout: seconds per block; a run that takes longer is killed.
        say: called with progress messages.

    Returns:
        The outcome of each run by name.
    """
    players = {name: _Player(function) for name, function in runs.items()}
    outcomes: dict[str, Outcome] = {}
    try:
        for number in range(rounds + 2):
            # Every other round is in reverse order, since the first run finds a machine that has just rested.
            for name in list(runs) if number % 2 else reversed(list(runs)):
                if name in outcomes:
                    continue
                player, started = players[name], time.monotonic()
                player.play(timeout)
                if player.has_ended:
                    outcomes[name] = player.child_outcome()
                what = "warm-up" if number == 0 else "end" if number > rounds else f"round {number}/{rounds}"
                failed = f", {outcomes[name].short_error}" if name in outcomes and not outcomes[name].ok else ""
                say(f"{what}: {name}: {time.monotonic() - started:.1f} s{failed}")
    finally:
        for player in players.values():
            player.kill()
    return {name: outcomes[name] for name in runs}


class _Player:
    """The parent's side of one run; its process starts with its first block."""

    def __init__(self, function: Callable[[Pause], Any]) -> None:
        self._function = function
        self._child: Child | None = None
        self._go = self._done = -1
        self.has_ended = False

    def play(self, timeout: float) -> None:
        """Lets the run compute until it pauses or ends; kills it after `timeout` seconds."""
        if self._child is None:
            child_go, self._go = os.pipe()
            self._done, child_done = os.pipe()
            self._child = Child(functools.partial(_run, self._function, child_go, child_done, os.getpid()))
            os.close(child_go)
            os.close(child_done)
        else:
            os.write(self._go, b".")
        deadline = time.monotonic() + timeout
        # A child's end does not close the pipe if a later child has inherited it, so its status is polled, too.
        while not self._child.ended():
            if select.select([self._done], [], [], 0.01)[0] and os.read(self._done, 1):
                return
            if time.monotonic() > deadline:
                self._child.kill(f"still running after {timeout:.0f} s, killed")
        self.has_ended = True

    def child_outcome(self) -> Outcome:
        """The outcome, after the run has ended."""
        assert self._child is not None
        os.close(self._go)
        os.close(self._done)
        return self._child.outcome()

    def kill(self) -> None:
        """Kills the run if it has not ended."""
        if self._child is not None and not self.has_ended:
            self._child.kill("killed")


def _run(function: Callable[[Pause], Any], go: int, done: int, parent: int) -> Any:
    def pause() -> None:
        os.write(done, b".")
        # Other children keep the pipe open, so the parent's end is noticed by its process id.
        while not select.select([go], [], [], 2.0)[0]:
            if os.getppid() != parent:
                os._exit(1)
        os.read(go, 1)

    return function(pause)


# ---- clock -----------------------------------------------------------------------------------------------


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
