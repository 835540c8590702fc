"""Throughput of the modes on a small decoder; `python -m benchmarks.modes`.

  HF eager, lazy, eager+compile, eager+dynamo   our Trainer with that `xla_mode`;
  HF stock                                      transformers.Trainer on XLA, optim="adamw_torch";
  plain CPU                                     a loop of torch on the CPU without XLA: no Trainer around it.
Each run is in its own process. After the warm-up, in which everything is compiled, the runs alternate in blocks of
steps; nothing is logged in these. "CPU" is that of all threads. Medians over the blocks; where processes share cores,
compare CPU time.

RFC pytorch/xla#7253 reports on its TPU 65 : 147 : 147 tokens/s for eager : lazy : eager+compile.
"""

from __future__ import annotations

import sys
from dataclasses import asdict

from benchmarks import report
from benchmarks.harness import Plan
from benchmarks.runs import Found, add_options, add_sizes, chosen, chosen_sizes, divided, measure
from benchmarks.sizes import Size
from benchmarks.timed_loops import CPU
from benchmarks.timed_trainers import HF_STOCK, MODES

EAGER, LAZY, COMPILED = "HF eager", "HF lazy", "HF eager+compile"
RUNS = (*MODES, HF_STOCK, CPU)


def table_of(found: Found, size: Size) -> str:
    """The runs for a person; errors stand below."""
    rows = []
    for name in RUNS:
        rate = divided(1000 * size.batch * size.length, found.get(name, "wall_ms"))
        to_others = (found.ratio(other, name, "wall_ms") for other in (EAGER, HF_STOCK))
        figures = ("wall_ms", "process_ms", "compile_seconds", "compiles_while_timed", "mean_loss")
        rows.append((name, rate, *to_others, *(found.get(name, figure) for figure in figures)))
    headers = ["run", "tokens/s", "to eager", "to stock lazy", "wall ms/step", "CPU ms/step", "graphs compiled s"]
    headers += ["compiles while timed", "mean loss"]
    return "\n".join([report.table(headers, rows), *(f"  {name}: {why}" for name, why in found.failed.items())])


def add_targets(made: report.Report, found: Found) -> None:
    """How the compiled step must stand to the others; a run that failed misses them."""
    for other, limit in ((LAZY, 0.95), (HF_STOCK, 0.95), (EAGER, 2.0)):
        rate = found.ratio(other, COMPILED, "wall_ms")
        made.target(f"tokens/s of {COMPILED} against {other}", rate, "at least", limit)


def main(command: list[str] | None = None) -> int:
    """The program."""
    parser = report.parser(str(__doc__).splitlines()[0])
    add_options(parser, RUNS, Plan(warmup=3, steps=30, rounds=3), timeout=300)
    add_sizes(parser, "llama 2x128", "batch", "length", "vocabulary", heads=4)
    options = parser.parse_args(command)
    names, plan = chosen(parser, options, RUNS)
    made = report.Report("modes", settings=asdict(plan))
    for size in chosen_sizes(parser, options, dropout=0.0):
        found = measure(names, size, plan, options.timeout)
        made.results[str(size)] = found.plain()
        add_targets(made, found)
        print(str(__doc__).split("\n\n", 1)[1])
        print(f"{size}, {plan}\n\n{table_of(found, size)}")
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
