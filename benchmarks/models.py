"""Training throughput of several models, ours and peers; `python -m benchmarks.models`.

One step is forward, loss, backward, clipping and AdamW, float32, in a hand-written loop. The runs alternate in blocks
of steps, each in its own process:
  ours            CompiledStep;
  CompiledStep+dynamo   the same with a model that torch.compile compiled, as under xla_mode="eager+dynamo";
  lazy loop       torch_xla.sync() at each step;
  openxla+lazy, +compile, +dynamo   forward and backward by torch.compile(backend="openxla"); the update
                  lazily, in torch_xla.compile, or by dynamo too: the best counts;
  plain CPU       torch without XLA, its update fused;
  inductor        the same with torch.compile around model and loss.
Rows per second of wall time, medians over the blocks; "to X" is ours divided by X. The target is to be faster than the
XLA peers; the table also shows whether XLA or torch's kernels are faster on this CPU. "runs" are executions per step of
ours, of it with dynamo, and of the best openxla.

The run with dynamo must be the same step as ours: one compile, one execution per step, equal losses. Under
--no-dropout the losses of both are compared with the plain CPU's, too, over the first steps (rounding grows in later
ones). "off by" is the largest difference of a loss, relative for losses above 1. Only chosen runs have targets.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from benchmarks import report, timed_loops
from benchmarks.clock import Plan, Timing
from benchmarks.interleaved import Pause
from benchmarks.model_table import MODELS, Model, Shape, named
from benchmarks.timed_loops import CPU, INDUCTOR, INLINED, LAZY, OPENXLA, STEP
from benchmarks.timed_runs import Found, add_options, chosen, divided, measure

RUNS = (STEP, INLINED, LAZY, *OPENXLA, CPU, INDUCTOR)
# Steps whose losses are compared with the CPU's, and how far they may be off.
COMPARED, LOSS_LIMIT = 3, 1e-3


def measure_model(
    model: Model, names: Sequence[str], shape: Shape, plan: Plan, timeout: float, *, dropout: bool = True
) -> Found:
    """The named runs of a model."""
    if model.missing is not None:
        return Found(failed=dict.fromkeys(names, model.missing))
    runs = {name: functools.partial(_run, name, model, shape, plan, dropout) for name in names}
    return measure(runs, plan.rounds, timeout, model.name, {})


def _run(name: str, model: Model, shape: Shape, plan: Plan, dropout: bool, pause: Pause) -> Timing:
    # Here and not in the parent, which must not compute with torch.
    batches = model.batches(plan.total, shape)
    return timed_loops.run(name, functools.partial(model.build, shape, dropout=dropout), batches, plan, pause)


def off_by(found: Found, name: str, other: str, steps: int | None = None) -> float | None:
    """The largest difference between the losses of two runs; None if one of them was not measured.

    Args:
        found: the runs.
        name, other: of the runs.
        steps: compares only so many from the start.
    """
    if name not in found.timings or other not in found.timings:
        return None
    pairs = zip(found.timings[name].losses[:steps], found.timings[other].losses[:steps], strict=True)
    # Not max(): it may lose what is not a number.
    return float(np.max([abs(one - two) / max(1.0, abs(two)) for one, two in pairs]))


def add_targets(made: report.Report, model: Model, found: Found, names: Sequence[str], *, dropout: bool = True) -> None:
    """Adds the targets of the chosen runs; a figure that was not measured misses its target."""
    ours = found.get(STEP, "wall_ms")
    if STEP in names and LAZY in names:
        to_lazy = divided(found.get(LAZY, "wall_ms"), ours)
        made.target(f"{model.name}: throughput to {LAZY}", to_lazy, "at least", 1)
    if STEP in names and any(name in names for name in OPENXLA):
        to_best = divided(found.best(OPENXLA, "wall_ms"), ours)
        made.target(f"{model.name}: throughput to the best openxla", to_best, "at least", 1)
    if INLINED in names:
        for what in ("compiles", "executions"):
            made.target(f"{model.name}: {what} with dynamo", found.get(INLINED, what), "exactly", 1)
        if STEP in names:
            made.target(f"{model.name}: losses with dynamo to ours", off_by(found, INLINED, STEP), "exactly", 0)
    for name in (STEP, INLINED):
        if name in names and CPU in names and not dropout:
            far = off_by(found, name, CPU, COMPARED)
            made.target(f"{model.name}: losses of {name} to the CPU", far, "at most", LOSS_LIMIT)


def table_of(found: dict[Model, Found], shape: Shape) -> str:
    """The models as a table, followed by the failed runs."""
    rows, lines = [], []
    for model, one in found.items():
        walls = {name: one.get(name, "wall_ms") for name in (STEP, LAZY, CPU, INDUCTOR)}
        walls["openxla"] = one.best(OPENXLA, "wall_ms")
        order = (LAZY, "openxla", CPU, INDUCTOR)
        best = [name for name in OPENXLA if name in one.timings and one.get(name, "wall_ms") == walls["openxla"]]
        rows.append(
            (
                model.name,
                *(divided(1000 * shape.batch, walls[name]) for name in (STEP, *order)),
                *(divided(walls[name], walls[STEP]) for name in order),
                best[0] if best else None,
                *(one.get(name, "executions") for name in (STEP, INLINED, *best[:1])),
                *([] if best else [None]),
                one.get(STEP, "mean_loss"),
                one.get(CPU, "mean_loss"),
            )
        )
        lines += [f"  {model.name} {name}: {why}" for name, why in one.failed.items()]
    headers = ["model", "ours rows/s", "lazy", "openxla", "CPU", "inductor"]
    headers += [
        "to lazy",
        "to openxla",
        "to CPU",
        "to inductor",
        "best openxla",
        "runs",
        "+dynamo",
        "openxla",
        "loss",
        "loss CPU",
    ]
    return "\n".join([report.table(headers, rows), *lines])


def table_with_dynamo(found: dict[Model, Found], shape: Shape) -> str:
    """The models with `CompiledStep+dynamo`, as a table."""
    rows = [
        (
            model.name,
            *(one.get(INLINED, what) for what in ("compiles", "executions")),
            *(divided(1000 * shape.batch, one.get(name, "wall_ms")) for name in (INLINED, STEP)),
            off_by(one, INLINED, STEP),
            off_by(one, INLINED, CPU, COMPARED),
        )
        for model, one in found.items()
    ]
    headers = ["model", "compiles", "runs", "rows/s", "ours rows/s", "off by from ours", "off by from the CPU"]
    return report.table(headers, rows)


def main(command: list[str] | None = None) -> int:
    """The program."""
    parser = report.parser(str(__doc__).splitlines()[0])
    add_options(parser, RUNS, Plan(warmup=5, steps=4, rounds=5), timeout=900)
    parser.add_argument("--models", default=",".join(model.name for model in MODELS), help="comma-separated")
    for name, value in asdict(Shape()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--no-dropout", action="store_true", help="drop nothing; compare with the plain CPU")
    options = parser.parse_args(command)
    names, plan = chosen(parser, options, RUNS)
    shape = Shape(options.batch, options.pixels, options.length)
    try:
        models = named(options.models)
    except ValueError as error:
        parser.error(str(error))
    dropout = not options.no_dropout
    made = report.Report("models", settings={**asdict(plan), **asdict(shape), "dropout": dropout})
    made.results["models"] = {}
    found: dict[Model, Found] = {}
    for model in models:
        found[model] = measure_model(model, names, shape, plan, options.timeout, dropout=dropout)
        made.results["models"][model.name] = found[model].plain()
        add_targets(made, model, found[model], names, dropout=dropout)
        made.save(options)
    print(str(__doc__).split("\n\n", 1)[1])
    print(f"{plan}, {shape}\n")
    print(table_of(found, shape))
    if INLINED in names:
        print(f"\n{table_with_dynamo(found, shape)}")
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
