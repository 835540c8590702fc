"""Peak memory of a training with and without replay; `python -m benchmarks.memory`.

The same training with HF's Trainer (stock and ours), with Lightning's Trainer and our strategy, and with hand-written
loops, each in its own process. Figures are the peak memory of the process in MiB, above that before the model was made.
On the CPU this includes the device's memory.
  warm-up    the first steps, including the compiler's memory;
  steps      the steps after it.
Medians over the repeats. "Traced" runs trace each call of the step, "replayed" ones call its executable.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import asdict

from benchmarks import report
from benchmarks.clock import Plan, Timing
from benchmarks.deep_models import Size, sizes
from benchmarks.timed_loops import COMPILE, LAZY, STEP
from benchmarks.timed_runs import add_options, chosen, divided, measure_transformer
from benchmarks.timed_trainers import HF_REPLAYED, HF_RUNS, HF_TRACED, LIGHTNING_REPLAYED, LIGHTNING_TRACED

RUNS = (*HF_RUNS, LIGHTNING_TRACED, LIGHTNING_REPLAYED, LAZY, COMPILE, STEP)
_LIMIT = 1.05
_PAIRS = ((HF_REPLAYED, HF_TRACED), (LIGHTNING_REPLAYED, LIGHTNING_TRACED))
_PHASES = {"warmup_peak_mb": "warm-up", "steps_peak_mb": "steps"}

Timings = dict[str, list[Timing]]


def peak(timings: Timings, name: str, phase: str) -> float | None:
    """The peak of a run in one phase, in MiB."""
    found = timings.get(name)
    return statistics.median(getattr(timing, phase) for timing in found) if found else None


def whole(timings: Timings, name: str) -> float | None:
    """The peak of the whole run."""
    found = timings.get(name)
    return statistics.median(max(getattr(timing, phase) for phase in _PHASES) for timing in found) if found else None


def add_targets(made: report.Report, size: Size, timings: Timings) -> None:
    """Limits for the memory of replay, in the steps and in the whole run."""
    for ours, traced in _PAIRS:
        steps = [peak(timings, name, "steps_peak_mb") for name in (ours, traced)]
        made.target(f"{size} {ours}: peak of the steps to {traced}", divided(*steps), "at most", _LIMIT)
        run = [whole(timings, name) for name in (ours, traced)]
        made.target(f"{size} {ours}: peak of the run to {traced}", divided(*run), "at most", _LIMIT)


def main(command: list[str] | None = None) -> int:
    """The program."""
    parser = report.parser(str(__doc__).splitlines()[0])
    add_options(parser, RUNS, Plan(warmup=6, steps=10, rounds=1), timeout=600)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--depths", default="4x256,12x128", help="comma-separated LAYERSxWIDTH")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args(command)
    names, plan = chosen(parser, options, RUNS)
    try:
        models = sizes(options.depths, length=options.length, batch=options.batch)
    except ValueError as error:
        parser.error(str(error))
    made = report.Report("memory", settings={**asdict(plan), "models": [asdict(size) for size in models]})
    rows: list[tuple[object, ...]] = []
    lines: list[str] = []
    for size in models:
        timings: Timings = {}
        for _ in range(options.repeats):
            # One after another: runs that wait would share the machine's memory.
            for name in names:
                found = measure_transformer([name], size, plan, options.timeout)
                if name in found.timings:
                    timings.setdefault(name, []).append(found.timings[name])
                lines += [f"  {size} {name}: {why}" for why in found.failed.values()]
        rows += [
            (str(size), name, *(peak(timings, name, phase) for phase in _PHASES), whole(timings, name))
            for name in names
        ]
        made.results[str(size)] = {name: [asdict(timing) for timing in found] for name, found in timings.items()}
        add_targets(made, size, timings)
        made.save(options)
    print(str(__doc__).split("\n\n", 1)[1])
    print(f"{plan}, batches of {options.batch} x {options.length}, {options.repeats} repeats\n")
    headers = ("model", "run", *(f"{phase} MB" for phase in _PHASES.values()), "whole run MB")
    print("\n".join([report.table(headers, rows), *lines]))
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
