"""Host overhead per training step, by depth and width; `python -m benchmarks.host_overhead`.

Each run is in its own process. After the warm-up, the runs alternate in blocks of steps.
  HF, Lightning stock        transformers.Trainer and Lightning's Trainer on XLA, without this package;
  HF, Lightning traced       ours with step_replay=False;
  HF, Lightning replayed     ours with defaults;
  lazy loop                  a hand-written loop with torch_xla.sync() after each step;
  torch_xla.compile          the loop's body in torch_xla.compile;
  openxla+lazy, +compile, +dynamo   forward and backward in torch.compile(backend="openxla"); the update
                             lazily, in torch_xla.compile, or in torch.compile, too;
  CompiledStep               the loop's body in our CompiledStep; "traced" with step_replay=False;
  HF, Lightning unreported   replayed, with xla_report=False; only if named;
  HF eager, lazy, eager+compile, eager+dynamo   ours with that `xla_mode`; only if named;
  plain CPU                  a loop of torch without XLA; only if named;
  TRL SFT stock, traced      TRL's SFTTrainer on XLA, and the same with our mixin;
  JAX                        the same model in JAX, with a jitted step and donated state.
"--rows traced" runs what is traced at each step, and its stock peers, in fewer blocks.
"on 1 core": the process is pinned to one core from its start. "Host CPU" is that of the main thread, "process CPU" that
of all threads; milliseconds per step, medians over the blocks. During timing nothing is logged and no replay is
verified (see `benchmarks.verification`). HF's mean loss is lower, because transformers divides by all labels, including
the first of each row. "to stock" divides by the stock run of the same trainer, of a loop by the lazy one. "transfers"
are copies to the device per step beside the tensors of the batch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from benchmarks import report
from benchmarks.harness import Plan
from benchmarks.runs import (
    DEVICE_RUNS,
    JAX,
    ON_ONE_CORE,
    Found,
    add_options,
    add_sizes,
    chosen,
    chosen_sizes,
    divided,
    measure,
    missing,
)
from benchmarks.sizes import VIT, Size
from benchmarks.timed_loops import CPU, LAZY, OPENXLA, STEP, STEP_TRACED
from benchmarks.timed_trainers import (
    HF_REPLAYED,
    HF_STOCK,
    HF_TRACED,
    HF_UNREPORTED,
    LIGHTNING_REPLAYED,
    LIGHTNING_STOCK,
    LIGHTNING_TRACED,
    LIGHTNING_UNREPORTED,
    MODES,
    TRL_STOCK,
    TRL_TRACED,
)

PINNED = tuple(name + ON_ONE_CORE for name in (HF_REPLAYED, LIGHTNING_REPLAYED, JAX))
RUNS = (*DEVICE_RUNS, *PINNED)
DEPTHS = "2x128,6x64,12x32,24x32,48x32"
REPLAYED_PEERS = {HF_REPLAYED: HF_STOCK, LIGHTNING_REPLAYED: LIGHTNING_STOCK}
TRACED_PEERS = {HF_TRACED: HF_STOCK, LIGHTNING_TRACED: LIGHTNING_STOCK, STEP_TRACED: LAZY, TRL_TRACED: TRL_STOCK}
# The same without the run report, where that is named: how much the report may add.
UNREPORTED = {HF_REPLAYED: HF_UNREPORTED, LIGHTNING_REPLAYED: LIGHTNING_UNREPORTED}
_REPORT = 1.01
PEERS = {**REPLAYED_PEERS, **TRACED_PEERS, STEP: LAZY, **dict.fromkeys(MODES, HF_STOCK)}
NAMED_ONLY = (*UNREPORTED.values(), *MODES, CPU)
TRACED = tuple(dict.fromkeys(name for pair in TRACED_PEERS.items() for name in reversed(pair)))
# Of a step that is traced: host CPU and wall time to the stock peer, copies to the device beside the batch.
_TRACED_HOST, _TRACED_WALL, _TRACED_TRANSFERS = 1.1, 0.9, 8
_TRACED_SIZES = ((2, 128), (12, 32))
# Parts of JAX's process CPU and of the best openxla's that ours may cost.
_JAX_LIMIT, _OPENXLA_LIMIT = 1.1, 0.8
# Wall time of the mode with a compiled step to the others', where both are named.
_COMPILED = "HF eager+compile"
_MODE_LIMITS = {"HF lazy": 1.05, HF_STOCK: 1.05, "HF eager": 0.5}


def _limits(size: Size) -> tuple[float | None, float | None]:
    """What host CPU and wall time of a replayed step may be, divided by the stock peer's."""
    if (size.layers, size.width) == (2, 128):
        return 1 / 4, 0.35
    return (1 / 12, 0.13 if size.width == 32 else None) if size.layers >= 12 else (None, None)


def add_targets(made: report.Report, size: Size, found: Found, names: Sequence[str] = RUNS) -> None:
    """Adds the targets of the chosen runs; a figure that was not measured misses its target."""
    for ours, stock in TRACED_PEERS.items():
        if ours not in names or missing(ours, size) is not None:
            continue
        if (size.layers, size.width) in _TRACED_SIZES and size.family != VIT:
            host, wall = (found.ratio(ours, stock, kind) for kind in ("host_ms", "wall_ms"))
            made.target(f"{size} {ours}: host CPU to {stock}", host, "at most", _TRACED_HOST)
            made.target(f"{size} {ours}: wall to {stock}", wall, "at most", _TRACED_WALL)
        transfers = found.get(ours, "transfers")
        made.target(f"{size} {ours}: transfers to the device per step", transfers, "at most", _TRACED_TRANSFERS)
    for ours, without in UNREPORTED.items():
        for kind in ("wall", "host CPU") if {ours, without} <= set(names) else ():
            ratio = found.ratio(ours, without, "wall_ms" if kind == "wall" else "host_ms")
            made.target(f"{size} {ours}: {kind} to {without}", ratio, "at most", _REPORT)
    for other, most in _MODE_LIMITS.items() if _COMPILED in names else ():
        made.target(f"{size} {_COMPILED}: wall to {other}", found.ratio(_COMPILED, other, "wall_ms"), "at most", most)
    for ours, stock in REPLAYED_PEERS.items():
        if ours not in names or stock not in names:
            continue
        for kind, limit in zip(("host CPU", "wall"), _limits(size), strict=True):
            if limit is not None:
                ratio = found.ratio(ours, stock, "wall_ms" if kind == "wall" else "host_ms")
                made.target(f"{size} {ours}: {kind} to {stock}", ratio, "at most", limit)
        pinned = found.ratio(ours + ON_ONE_CORE, JAX + ON_ONE_CORE, "process_ms")
        made.target(f"{size} {ours}: process CPU to JAX, on 1 core", pinned, "at most", _JAX_LIMIT)
        part = divided(found.get(ours, "process_ms"), found.best(OPENXLA, "process_ms"))
        made.target(f"{size} {ours}: process CPU to the best openxla", part, "at most", _OPENXLA_LIMIT)
        made.target(f"{size} {ours}: compiles", found.get(ours, "compiles"), "exactly", 1)
        made.target(f"{size} {ours}: executions per step", found.get(ours, "executions"), "exactly", 1)


def table_of(found: dict[Size, Found], names: Sequence[str]) -> str:
    """The runs as a table, followed by the failed ones."""
    times, counts = ("host_ms", "process_ms", "wall_ms"), ("compiles", "executions", "transfers", "mean_loss")
    rows = [
        (
            str(size),
            name,
            *(one.get(name, kind) for kind in times),
            *(one.ratio(name, PEERS[name], kind) if name in PEERS else None for kind in ("host_ms", "wall_ms")),
            *(one.get(name, kind) for kind in counts),
        )
        for size, one in found.items()
        for name in names
    ]
    headers = ["model", "run", "host CPU ms", "process CPU ms", "wall ms", "host to stock", "wall to stock"]
    headers += ["compiles", "executions/step", "transfers/step", "mean loss"]
    lines = [f"  {size} {name}: {why}" for size, one in found.items() for name, why in one.failed.items()]
    return "\n".join([report.table(headers, rows), *lines])


def main(command: list[str] | None = None) -> int:
    """The program."""
    parser = report.parser(str(__doc__).splitlines()[0])
    add_options(parser, RUNS, Plan(), timeout=1800)
    parser.add_argument("--rows", choices=("all", "traced"), default="all", help="the runs, where --runs is not given")
    add_sizes(parser, DEPTHS, "length", "batch", "vocabulary", "heads", "dropout")
    options = parser.parse_args(command)
    names, plan = chosen(parser, options, (*RUNS, *NAMED_ONLY))
    if options.rows == "traced" and options.runs == ",".join(RUNS):
        names, plan = list(TRACED), plan if plan != Plan() else replace(plan, warmup=4, rounds=3)
    models = chosen_sizes(parser, options)
    made = report.Report("host_overhead", settings={**asdict(plan), "models": [asdict(size) for size in models]})
    made.results["models"] = {}
    found: dict[Size, Found] = {}
    for size in models:
        found[size] = measure(names, size, plan, options.timeout)
        made.results["models"][str(size)] = found[size].plain()
        add_targets(made, size, found[size], names)
        # Saved after each size, in case the program is killed.
        made.save(options)
    print(str(__doc__).split("\n\n", 1)[1])
    print(f"{plan}\n")
    print(table_of(found, names))
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
