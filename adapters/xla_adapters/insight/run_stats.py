"""`RunStats`: totals of a whole run (steps, compiles, throughput), for the final summary and for loggers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from xla_adapters.runtime import Metrics, get_runtime


@dataclass
class RunStats:
    """Counts steps, samples, tokens and device counters between `start()` and `stop()`.

    Args:
        clock: returns monotonic seconds; replaced in tests.

    Attributes:
        steps, samples, tokens: counted so far.
        seconds: elapsed time; set by `stop()`.
        before, after: the device counters at `start()` and `stop()`.
    """

    clock: Callable[[], float] = time.perf_counter
    steps: int = 0
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    before: Metrics | None = field(default=None, repr=False)
    after: Metrics | None = field(default=None, repr=False)
    _started: float = 0.0
    _last: RunStats | None = field(default=None, repr=False)

    def start(self) -> None:
        """Starts counting from zero."""
        self.steps = self.samples = self.tokens = 0
        self.before, self.after = get_runtime().counters.metrics(), None
        self._started = self.clock()
        self._last = None

    def count_step(self) -> None:
        """Counts one optimizer step."""
        self.steps += 1

    def count_batch(self, *, samples: int = 0, tokens: int = 0) -> None:
        """Adds the samples and tokens of one batch."""
        self.samples += samples
        self.tokens += tokens

    def stop(self) -> None:
        """Stops counting; waits for the device."""
        self.after = get_runtime().counters.metrics()
        self.seconds = self.clock() - self._started

    def lap(self) -> dict[str, float]:
        """As `as_dict`, since the last `lap()` or since `start()`; waits for the device."""
        now = RunStats(
            steps=self.steps,
            samples=self.samples,
            tokens=self.tokens,
            after=get_runtime().counters.metrics(),
            seconds=self.clock() - self._started,
        )
        last, self._last = self._last or RunStats(after=self.before), now
        part = RunStats(
            steps=now.steps - last.steps,
            samples=now.samples - last.samples,
            tokens=now.tokens - last.tokens,
            before=last.after,
            after=now.after,
            seconds=now.seconds - last.seconds,
        )
        return part.as_dict()

    def as_dict(self) -> dict[str, float]:
        """The totals by name. Rates per second exclude the time spent compiling. Empty before `stop()`."""
        if self.before is None or self.after is None:
            return {}
        compile_seconds = self.after.compile_seconds - self.before.compile_seconds
        running = max(self.seconds - compile_seconds, 1e-9)
        steps = max(self.steps, 1)
        totals = {
            "steps": float(self.steps),
            "compiles": float(self.after.compiles - self.before.compiles),
            "executions": float(self.after.executions - self.before.executions),
            "transfers_to_host": float(self.after.transfers_to_host - self.before.transfers_to_host),
            "eager_ops": float(self.after.eager_ops - self.before.eager_ops),
            "seconds": self.seconds,
            "compile_seconds": compile_seconds,
            "steps_per_second": self.steps / running,
        }
        totals["executions_per_step"] = totals["executions"] / steps
        if self.samples:
            totals["samples_per_second"] = self.samples / running
        if self.tokens:
            totals["tokens_per_second"] = self.tokens / running
        return totals

    def summary(self) -> str:
        """The totals as a few lines of text."""
        totals = self.as_dict()
        if not totals:
            return "nothing was run"
        share = 100 * totals["compile_seconds"] / max(totals["seconds"], 1e-9)
        rows = [
            ("steps", f"{self.steps} in {totals['seconds']:.1f} s"),
            ("compiles", f"{totals['compiles']:.0f}"),
            ("executions", f"{totals['executions']:.0f} ({totals['executions_per_step']:.2f} per step)"),
            ("transfers to host", f"{totals['transfers_to_host']:.0f}"),
            ("eager operations", f"{totals['eager_ops']:.0f}"),
            ("lost to compiling", f"{totals['compile_seconds']:.1f} s ({share:.0f}%)"),
        ]
        if self.tokens:
            rows.append(("throughput", f"{totals['tokens_per_second']:,.0f} tokens/s"))
        elif self.samples:
            rows.append(("throughput", f"{totals['samples_per_second']:,.1f} samples/s"))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)
