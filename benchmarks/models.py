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
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import asdict

from benchmarks import report, timed_loops
from benchmarks.clock import Plan, Timing
from benchmarks.interleaved import Pause
from benchmarks.model_table import MODELS, Model, Shape, named
from benchmarks.timed_loops import CPU, INDUCTOR, INLINED, LAZY, OPENXLA, STEP
from benchmarks.timed_runs import Found, add_options, chosen, divided, measure

RUNS = (STEP, INLINED, LAZY, *OPENXLA, CPU, INDUCTOR)


def measure_model(model: Model, names: Sequence[str], shape: Shape, plan: Plan, timeout: float) -> Found:
    """The named runs of a model."""
    if model.missing is not None:
        return Found(failed=dict.fromkeys(names, model.missing))
    runs = {name: functools.partial(_run, name, model, shape, plan) for name in names}
    return measure(runs, plan.rounds, timeout, model.name, {})


def _run(name: str, model: Model, shape: Shape, plan: Plan, pause: Pause) -> Timing:
    # Here and not in the parent, which must not compute with torch.
    batches = model.batches(plan.total, shape)
    return timed_loops.run(name, functools.partial(model.build, shape), batches, plan, pause)


def add_targets(made: report.Report, model: Model, found: Found) -> None:
    """Adds the targets: faster than every XLA peer; a figure that was not measured misses its target."""
    ours = found.get(STEP, "wall_ms")
    for peer, wall in ((LAZY, found.get(LAZY, "wall_ms")), ("the best openxla", found.best(OPENXLA, "wall_ms"))):
        made.target(f"{model.name}: throughput to {peer}", divided(wall, ours), "at least", 1)


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


def main(command: list[str] | None = None) -> int:
    """The program."""
    parser = report.parser(str(__doc__).splitlines()[0])
    add_options(parser, RUNS, Plan(warmup=5, steps=4, rounds=5), timeout=900)
    parser.add_argument("--models", default=",".join(model.name for model in MODELS), help="comma-separated")
    for name, value in asdict(Shape()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args(command)
    names, plan = chosen(parser, options, RUNS)
    shape = Shape(options.batch, options.pixels, options.length)
    try:
        models = named(options.models)
    except ValueError as error:
        parser.error(str(error))
    made = report.Report("models", settings={**asdict(plan), **asdict(shape)})
    made.results["models"] = {}
    found: dict[Model, Found] = {}
    for model in models:
        found[model] = measure_model(model, names, shape, plan, options.timeout)
        made.results["models"][model.name] = found[model].plain()
        add_targets(made, model, found[model])
        made.save(options)
    print(str(__doc__).split("\n\n", 1)[1])
    print(f"{plan}, {shape}\n")
    print(table_of(found, shape))
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
