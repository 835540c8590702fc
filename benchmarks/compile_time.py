"""The start-up time of a training, by depth; `python -m benchmarks.compile_time`.

Each run trains a transformer for a few steps in its own process. Medians over the repeats, which are interleaved:
  first step   wall and CPU time (all threads) from the creation of the model to the end of the first step: tracing
               and compiling;
  warm-up      wall time to the end of the last step that compiles something;
  compiler     seconds in the XLA compiler (torch_xla counts them; JAX does not), and graphs compiled.
"HF stock", "HF traced" and "HF replayed" are transformers' Trainer and ours; the others are hand-written loops, see
`benchmarks.host_overhead`. "Compiled fast" means `initialize(fast_compile=True)`. The runs of
`benchmarks.loops_in_graphs` only run if they are named. On the CPU torch_xla has no persistent cache of compiled
graphs.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import asdict, replace

from benchmarks import loops_in_graphs, report
from benchmarks.clock import Plan, Timing
from benchmarks.deep_models import DROPOUT, FAMILIES, GPT2, Size, sizes
from benchmarks.timed_loops import COMPILE, OPENXLA, STEP
from benchmarks.timed_runs import COMPILED_FAST, JAX, add_options, chosen, divided, measure_transformer
from benchmarks.timed_trainers import HF_REPLAYED, HF_RUNS, HF_STOCK, HF_TRACED

HF_FAST = HF_REPLAYED + COMPILED_FAST
RUNS = (*HF_RUNS, HF_FAST, COMPILE, *OPENXLA, STEP, JAX)
_NAMED_ONLY = (*loops_in_graphs.RUNS, *(name + COMPILED_FAST for name in loops_in_graphs.RUNS))
# Depths that are compared, and the limit of the ratio of their compile times.
_DEPTHS, _GROWTH = (12, 48), 2.0
_KINDS = {
    "first_step_seconds": "first step s",
    "first_step_cpu_seconds": "CPU s",
    "warmup_seconds": "warm-up s",
    "compile_seconds": "compiler s",
    "compiles": "graphs",
}
Timings = dict[str, list[Timing]]


def median(timings: Timings, name: str, kind: str) -> float | None:
    """The median of a figure over the repeats."""
    values = [getattr(timing, kind) for timing in timings.get(name, [])]
    return statistics.median(values) if values and None not in values else None


def add_targets(made: report.Report, size: Size, timings: Timings) -> None:
    """Ours compiles one graph, with and without replay."""
    for name in (HF_TRACED, HF_REPLAYED, *({HF_FAST} & timings.keys())):
        made.target(f"{size} {name}: graphs compiled", median(timings, name, "compiles"), "exactly", 1)


def add_growth(made: report.Report, found: dict[Size, Timings]) -> None:
    """How much longer than the shallow model the deep one takes, by CPU time to the end of the first step."""
    for one in {str(replace(size, layers=_DEPTHS[1])): size for size in found}.values():
        shallow, deep = (found.get(replace(one, layers=layers), {}) for layers in _DEPTHS)
        for name in (HF_REPLAYED, HF_FAST):
            kind = "first_step_cpu_seconds"
            ratio = divided(median(deep, name, kind), median(shallow, name, kind))
            if deep and shallow and (name in deep or name in shallow):
                depths = " to ".join(str(replace(one, layers=layers)) for layers in reversed(_DEPTHS))
                title = f"{name}: CPU of the first step, {depths}"
                made.target(title, ratio, "at most", _GROWTH)


def rows_of(size: Size, timings: Timings, names: list[str]) -> list[tuple[object, ...]]:
    """The runs for a person."""
    stock = median(timings, HF_STOCK, "warmup_seconds")
    return [
        (
            str(size),
            name,
            *(median(timings, name, kind) for kind in _KINDS),
            divided(median(timings, name, "warmup_seconds"), stock),
        )
        for name in names
    ]


def main(command: list[str] | None = None) -> int:
    """The program."""
    parser = report.parser(str(__doc__).splitlines()[0])
    add_options(parser, RUNS, Plan(warmup=5, steps=1, rounds=1), timeout=900)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--depths", default="2x32,6x32,12x32,24x32,48x32", help="comma-separated LAYERSxWIDTH")
    parser.add_argument("--dropout", type=float, default=DROPOUT)
    parser.add_argument("--families", default=GPT2, help=f"comma-separated, of: {', '.join(FAMILIES)}")
    options = parser.parse_args(command)
    names, plan = chosen(parser, options, (*RUNS, *_NAMED_ONLY))
    families = [name.strip() for name in options.families.split(",")]
    if unknown := sorted(set(families) - set(FAMILIES)):
        parser.error(f"unknown families: {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    try:
        models = [size for name in families for size in sizes(options.depths, dropout=options.dropout, family=name)]
    except ValueError as error:
        parser.error(str(error))
    made = report.Report(
        "compile_time", settings={**asdict(plan), "repeats": options.repeats, "dropout": options.dropout}
    )
    rows: list[tuple[object, ...]] = []
    lines: list[str] = []
    measured: dict[Size, Timings] = {}
    for size in models:
        timings = measured[size] = {}
        for repeat in range(options.repeats):
            for name in reversed(names) if repeat % 2 else names:
                found = measure_transformer([name], size, plan, options.timeout)
                if name in found.timings:
                    timings.setdefault(name, []).append(found.timings[name])
                elif (line := f"  {size} {name}: {found.failed[name]}") not in lines:
                    lines.append(line)
        rows += rows_of(size, timings, names)
        made.results[str(size)] = {name: [asdict(timing) for timing in found] for name, found in timings.items()}
        add_targets(made, size, timings)
        made.save(options)
    add_growth(made, measured)
    print(str(__doc__).split("\n\n", 1)[1])
    print(f"{plan}, batches of {models[0].batch} x {models[0].length}, {options.repeats} repeats\n")
    headers = ("model", "run", *_KINDS.values(), "warm-up to HF stock")
    print("\n".join([report.table(headers, rows), *lines]))
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
