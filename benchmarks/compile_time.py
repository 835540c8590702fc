"""The start-up time and the peak memory of a training, by depth; `python -m benchmarks.compile_time`.

Each run trains a transformer for a few steps in its own process. Medians over the repeats, which are interleaved:
  first step   wall and CPU time (all threads) from the creation of the model to the end of the first step: tracing
               and compiling;
  warm-up      wall time to the end of the last step that compiles something;
  compiler     seconds in the XLA compiler (torch_xla counts them; JAX does not), and graphs compiled;
  MB           peak memory of the process above what it began with: to the end of the warm-up, and in the steps behind.
The runs are those of `benchmarks.host_overhead`; "traced" ones trace each call of the step, "replayed" ones call its
executable. "Compiled fast" means `initialize(fast_compile=True)`. There is no compile
cache (`benchmarks.warm_start` has one).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial

from benchmarks import report
from benchmarks.harness import Plan, Timing
from benchmarks.runs import (
    COMPILED_FAST,
    JAX,
    Timings,
    add_options,
    add_sizes,
    chosen,
    chosen_sizes,
    divided,
    measure_alone,
    median,
)
from benchmarks.sizes import Size
from benchmarks.timed_loops import COMPILE, OPENXLA, STEP
from benchmarks.timed_trainers import (
    HF_REPLAYED,
    HF_RUNS,
    HF_STOCK,
    HF_TRACED,
    LIGHTNING_REPLAYED,
    LIGHTNING_TRACED,
)

HF_FAST = HF_REPLAYED + COMPILED_FAST
RUNS = (*HF_RUNS, HF_FAST, COMPILE, *OPENXLA, STEP, JAX)
LIGHTNING = (LIGHTNING_TRACED, LIGHTNING_REPLAYED)
# Depths that are compared, and the limit of the ratio of their compile times.
_DEPTHS, _GROWTH = (12, 48), 2.0
# What replay may add to the peak memory of the traced peer.
_MEMORY = 1.05
_PAIRS = ((HF_REPLAYED, HF_TRACED), (LIGHTNING_REPLAYED, LIGHTNING_TRACED))
_PEAKS = ("warmup_peak_mb", "steps_peak_mb")
_KINDS = {
    "first_step_seconds": "first step s",
    "first_step_cpu_seconds": "CPU s",
    "warmup_seconds": "warm-up s",
    "compile_seconds": "compiler s",
    "compiles": "graphs",
    "warmup_peak_mb": "warm-up MB",
    "steps_peak_mb": "steps MB",
}


def _median(timings: Timings, name: str, kind: str) -> float | None:
    def value(timing: Timing) -> float | None:
        found: float | None = getattr(timing, kind)
        return found

    return median(timings, name, value)


def _peak(kinds: Sequence[str], timing: Timing) -> float:
    return float(max(getattr(timing, kind) for kind in kinds))


def add_targets(made: report.Report, size: Size, timings: Timings) -> None:
    """Ours compiles one graph, with and without replay; replay takes little memory, in the steps and in the whole."""
    for name in (HF_TRACED, HF_REPLAYED, *({HF_FAST} & timings.keys())):
        made.target(f"{size} {name}: graphs compiled", _median(timings, name, "compiles"), "exactly", 1)
    for pair in _PAIRS:
        for what, peaks in {"steps": _PEAKS[1:], "run": _PEAKS}.items() if set(pair) <= timings.keys() else ():
            values = [median(timings, name, partial(_peak, peaks)) for name in pair]
            made.target(f"{size} {pair[0]}: peak of the {what} to {pair[1]}", divided(*values), "at most", _MEMORY)


def add_growth(made: report.Report, found: dict[Size, Timings]) -> None:
    """How much longer than the shallow model the deep one takes, by CPU time to the end of the first step."""
    for one in {str(replace(size, layers=_DEPTHS[1])): size for size in found}.values():
        shallow, deep = (found.get(replace(one, layers=layers), {}) for layers in _DEPTHS)
        for name in (HF_REPLAYED, HF_FAST):
            if deep and shallow and (name in deep or name in shallow):
                ratio = divided(*(_median(each, name, "first_step_cpu_seconds") for each in (deep, shallow)))
                depths = " to ".join(str(replace(one, layers=layers)) for layers in reversed(_DEPTHS))
                made.target(f"{name}: CPU of the first step, {depths}", ratio, "at most", _GROWTH)


def main(command: list[str] | None = None) -> int:
    """The program."""
    parser = report.parser(str(__doc__).splitlines()[0])
    add_options(parser, RUNS, Plan(warmup=5, steps=1, rounds=1), timeout=900)
    parser.add_argument("--repeats", type=int, default=1)
    add_sizes(parser, "2x32,6x32,12x32,24x32,48x32", "batch", "length", "dropout")
    options = parser.parse_args(command)
    names, plan = chosen(parser, options, (*RUNS, *LIGHTNING))
    made = report.Report(
        "compile_time", settings={**asdict(plan), "repeats": options.repeats, "dropout": options.dropout}
    )
    rows: list[tuple[object, ...]] = []
    lines: list[str] = []
    measured: dict[Size, Timings] = {}
    for size in chosen_sizes(parser, options):
        timings, failed = measure_alone(names, size, plan, options.timeout, options.repeats)
        measured[size] = timings
        lines += failed
        stock = _median(timings, HF_STOCK, "warmup_seconds")
        for name in names:
            to_stock = divided(_median(timings, name, "warmup_seconds"), stock)
            rows.append((str(size), name, *(_median(timings, name, kind) for kind in _KINDS), to_stock))
        made.results[str(size)] = {name: [asdict(timing) for timing in found] for name, found in timings.items()}
        add_targets(made, size, timings)
        made.save(options)
    add_growth(made, measured)
    print(str(__doc__).split("\n\n", 1)[1])
    print(f"{plan}, batches of {options.batch} x {options.length}, {options.repeats} repeats\n")
    print("\n".join([report.table(("model", "run", *_KINDS.values(), "warm-up to HF stock"), rows), *lines]))
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
