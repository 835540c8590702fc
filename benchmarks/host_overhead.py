"""Host overhead per training step, by depth and width; `python -m benchmarks.host_overhead`.

Each run is in its own process. After the warm-up, the runs alternate in blocks of steps.
  HF, Lightning stock        transformers.Trainer and Lightning's Trainer on XLA, without this package;
  HF, Lightning traced       ours with step_replay=False;
  HF, Lightning replayed     ours with defaults;
  lazy loop                  a hand-written loop with torch_xla.sync() after each step;
  torch_xla.compile          the loop's body in torch_xla.compile;
  openxla+lazy, +compile, +dynamo   forward and backward in torch.compile(backend="openxla"); the update
                             lazily, in torch_xla.compile, or in torch.compile, too;
  CompiledStep               the loop's body in our CompiledStep;
  executable                 only the executable of CompiledStep, called with its own results;
  JAX                        the same model in JAX, with a jitted step and donated state.
"on 1 core": the process is pinned to one core from its start. "Host CPU" is that of the main thread, "process CPU" that
of all threads; milliseconds per step, medians over the blocks. During timing nothing is logged and no replay is
verified (see `benchmarks.verification`). HF's mean loss is lower, because transformers divides by all labels, including
the first of each row.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict

from benchmarks import report
from benchmarks.clock import Plan
from benchmarks.deep_models import Size, sizes
from benchmarks.timed_loops import EXECUTABLE, OPENXLA
from benchmarks.timed_runs import (
    DEVICE_RUNS,
    JAX,
    ON_ONE_CORE,
    Found,
    add_options,
    chosen,
    divided,
    measure_transformer,
)
from benchmarks.timed_trainers import HF_REPLAYED, HF_STOCK, LIGHTNING_REPLAYED, LIGHTNING_STOCK

PINNED = tuple(name + ON_ONE_CORE for name in (HF_REPLAYED, LIGHTNING_REPLAYED, EXECUTABLE, JAX))
RUNS = (*DEVICE_RUNS, *PINNED)
DEPTHS = "2x128,6x64,12x32,24x32,48x32"
_PAIRS = ((HF_REPLAYED, HF_STOCK), (LIGHTNING_REPLAYED, LIGHTNING_STOCK))
# Parts of JAX's process CPU and of the best openxla's that ours may cost.
_JAX_LIMIT, _OPENXLA_LIMIT = 1.1, 0.8


def _wall_limit(size: Size) -> float | None:
    if size.layers == 2 and size.width == 128:
        return 0.35
    return 0.13 if size.layers >= 12 and size.width == 32 else None


def _host_limit(size: Size) -> float | None:
    if size.layers == 2 and size.width == 128:
        return 1 / 4
    return 1 / 12 if size.layers >= 12 else None


def add_targets(made: report.Report, size: Size, found: Found) -> None:
    """Adds our targets; a figure that was not measured misses its target."""
    for ours, stock in _PAIRS:
        host = _host_limit(size)
        if host is not None:
            made.target(f"{size} {ours}: host CPU to {stock}", found.ratio(ours, stock, "host_ms"), "at most", host)
        limit = _wall_limit(size)
        if limit is not None:
            made.target(f"{size} {ours}: wall to {stock}", found.ratio(ours, stock, "wall_ms"), "at most", limit)
        pinned = found.ratio(ours + ON_ONE_CORE, JAX + ON_ONE_CORE, "process_ms")
        made.target(f"{size} {ours}: process CPU to JAX, on 1 core", pinned, "at most", _JAX_LIMIT)
        part = divided(found.get(ours, "process_ms"), found.best(OPENXLA, "process_ms"))
        made.target(f"{size} {ours}: process CPU to the best openxla", part, "at most", _OPENXLA_LIMIT)
        made.target(f"{size} {ours}: compiles", found.get(ours, "compiles"), "exactly", 1)
        made.target(f"{size} {ours}: executions per step", found.get(ours, "executions"), "exactly", 1)


def table_of(found: dict[Size, Found], names: Sequence[str]) -> str:
    """The runs as a table, followed by the failed ones."""
    kinds = ("host_ms", "process_ms", "wall_ms", "compiles", "executions", "mean_loss")
    rows = [
        (str(size), name, *(one.get(name, kind) for kind in kinds)) for size, one in found.items() for name in names
    ]
    headers = ("model", "run", "host CPU ms", "process CPU ms", "wall ms", "compiles", "executions/step", "mean loss")
    lines = [f"  {size} {name}: {why}" for size, one in found.items() for name, why in one.failed.items()]
    return "\n".join([report.table(headers, rows), *lines])


def main(command: list[str] | None = None) -> int:
    """The program."""
    parser = report.parser(str(__doc__).splitlines()[0])
    add_options(parser, RUNS, Plan(), timeout=1800)
    parser.add_argument("--depths", default=DEPTHS, help="comma-separated LAYERSxWIDTH")
    for name in ("length", "batch", "vocabulary"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Size(1, 1), name))
    options = parser.parse_args(command)
    names, plan = chosen(parser, options, RUNS)
    try:
        models = sizes(options.depths, length=options.length, batch=options.batch, vocabulary=options.vocabulary)
    except ValueError as error:
        parser.error(str(error))
    made = report.Report("host_overhead", settings={**asdict(plan), "models": [asdict(size) for size in models]})
    made.results["models"] = {}
    found: dict[Size, Found] = {}
    for size in models:
        found[size] = measure_transformer(names, size, plan, options.timeout)
        made.results["models"][str(size)] = found[size].plain()
        add_targets(made, size, found[size])
        # Saved after each size, in case the program is killed.
        made.save(options)
    print(str(__doc__).split("\n\n", 1)[1])
    print(f"{plan}\n")
    print(table_of(found, names))
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
