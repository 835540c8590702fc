"""`RunStats`: what a whole run cost, for the closing summary and for loggers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from xla_adapters.backend import Metrics, get_backend


@dataclass
class RunStats:
    """Counts steps, samples and tokens between `start()` and `stop()`.

    Args:
        clock: monotonic seconds; replaced in tests.
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
        """Begins, from zero."""
        self.steps = self.samples = self.tokens = 0
        self.before, self.after = get_backend().metrics(), None
        self._started = self.clock()
        self._last = None

    def count_step(self) -> None:
        """Counts one optimizer step."""
        self.steps += 1

    def count_batch(self, *, samples: int = 0, tokens: int = 0) -> None:
        """Counts what one batch held."""
        self.samples += samples
        self.tokens += tokens

    def stop(self) -> None:
        """Ends; waits for the device."""
        self.after = get_backend().metrics()
        self.seconds = self.clock() - self._started

    def lap(self) -> dict[str, float]:
        """As `as_dict`, of what was counted since the last `lap()`, or since `start()`; waits for the device."""
        now = RunStats(
            steps=self.steps,
            samples=self.samples,
            tokens=self.tokens,
            after=get_backend().metrics(),
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
        """The totals by name: counts, seconds, and rates per second without the time spent compiling."""
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
        """The totals as a few lines for a person."""
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
