"""Peak memory of a training with and without replay; `python -m benchmarks.memory`.

The same training with HF's Trainer (stock and ours), with Lightning's Trainer and our strategy, and with hand-written
loops, each in its own process. Figures are the peak memory of the process in MiB, above that before the model was made.
On the CPU this includes the device's memory.
  warm-up    the first steps, including the compiler's memory;
  steps      the steps after it.
Medians over the repeats. "Traced" runs trace each call of the step, "replayed" ones call its executable.
"""

from __future__ import annotations

import sys
from dataclasses import asdict

from benchmarks import report
from benchmarks.harness import Plan, Timing
from benchmarks.runs import Timings, add_options, add_sizes, chosen, chosen_sizes, divided, measure_alone, median
from benchmarks.sizes import Size
from benchmarks.timed_loops import COMPILE, LAZY, STEP
from benchmarks.timed_trainers import HF_REPLAYED, HF_RUNS, HF_TRACED, LIGHTNING_REPLAYED, LIGHTNING_TRACED

RUNS = (*HF_RUNS, LIGHTNING_TRACED, LIGHTNING_REPLAYED, LAZY, COMPILE, STEP)
_LIMIT = 1.05
_PAIRS = ((HF_REPLAYED, HF_TRACED), (LIGHTNING_REPLAYED, LIGHTNING_TRACED))


def _warmup(timing: Timing) -> float:
    return timing.warmup_peak_mb


def _steps(timing: Timing) -> float:
    return timing.steps_peak_mb


def _run(timing: Timing) -> float:
    return max(timing.warmup_peak_mb, timing.steps_peak_mb)


def add_targets(made: report.Report, size: Size, timings: Timings) -> None:
    """Limits for the memory of replay, in the steps and in the whole run."""
    for ours, traced in _PAIRS:
        for name, peak in (("steps", _steps), ("run", _run)):
            ratio = divided(*(median(timings, run, peak) for run in (ours, traced)))
            made.target(f"{size} {ours}: peak of the {name} to {traced}", ratio, "at most", _LIMIT)


def main(command: list[str] | None = None) -> int:
    """The program."""
    parser = report.parser(str(__doc__).splitlines()[0])
    add_options(parser, RUNS, Plan(warmup=6, steps=10, rounds=1), timeout=600)
    parser.add_argument("--repeats", type=int, default=7)
    add_sizes(parser, "4x256,12x128", "batch", length=128)
    options = parser.parse_args(command)
    names, plan = chosen(parser, options, RUNS)
    models = chosen_sizes(parser, options)
    made = report.Report("memory", settings={**asdict(plan), "models": [asdict(size) for size in models]})
    rows: list[tuple[object, ...]] = []
    lines: list[str] = []
    for size in models:
        # One after another: runs that wait would share the machine's memory.
        timings, failed = measure_alone(names, size, plan, options.timeout, options.repeats)
        lines += failed
        rows += [(str(size), name, *(median(timings, name, of) for of in (_warmup, _steps, _run))) for name in names]
        made.results[str(size)] = {name: [asdict(timing) for timing in found] for name, found in timings.items()}
        add_targets(made, size, timings)
        made.save(options)
    print(str(__doc__).split("\n\n", 1)[1])
    print(f"{plan}, batches of {options.batch} x {options.length}, {options.repeats} repeats\n")
    print("\n".join([report.table(("model", "run", "warm-up MB", "steps MB", "whole run MB"), rows), *lines]))
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
