"""Device counters per training step, of transformers' Trainer and ours; `python -m benchmarks.step_counts`.

Both train the same tiny models on the same batches, in lazy mode (stock) and `eager+compile` (ours), and log at every
step, each in its own process. Counted are graphs compiled and executed, copies from the device to the host, and
operations executed eagerly:
  in all       the whole of `train()`;
  per step     from the begin of the first step to the log of the last one, divided by the steps;
  in the step  from `on_step_begin` to `on_step_end`, the step with most of each: logging is outside.

With `--lightning`, Lightning's Trainer instead: see `benchmarks.lightning_counts`.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from typing import Any

import transformers

import hf_trainer
from benchmarks import report, zoo
from benchmarks.snapshots import StepSnapshots
from benchmarks.training import Batches, arguments, only_item
from tests.children import run_in_child
from xla_adapters import count, initialize

MODELS = "gpt-2,llama,bert (padded)"
COUNTS = ("compiles", "executions", "transfers_to_host", "eager_ops")
STOCK_DEFAULT, STOCK, OURS = "transformers, its defaults", "transformers, adamw_torch", "hf_trainer"


@dataclass
class Run:
    """One training: the counts, or why there are none."""

    model: str
    trainer: str
    in_all: dict[str, float] = field(default_factory=dict)
    per_step: dict[str, float] = field(default_factory=dict)
    in_step: dict[str, float] = field(default_factory=dict)
    logged_transfers: float | None = None
    losses: list[float] = field(default_factory=list)
    error: str | None = None


def train(architecture: zoo.Architecture, trainer: str, steps: int) -> Run:
    """Runs in a child."""
    initialize(eager=False)
    run = Run(architecture.name, trainer)
    snapshots = StepSnapshots()
    options: dict[str, Any] = {"optim": "adamw_torch"} if trainer == STOCK else {}
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {
            "model": architecture.build(),
            "args": arguments(folder, **options),
            "train_dataset": Batches(architecture.batches(steps)),
            "data_collator": only_item,
            "callbacks": [snapshots],
        }
        if trainer == OURS:
            made = hf_trainer.Trainer(**common, xla_mode="eager+compile", on_graph_break="error")
        else:
            made = transformers.Trainer(**common)
        with count() as counters:
            made.train()
    between = snapshots.between()
    done = len(snapshots.steps)
    run.in_all = {name: getattr(counters, name) for name in COUNTS}
    run.per_step = {name: between[name] / done for name in COUNTS}
    run.in_step = {name: max(step[name] for step in snapshots.steps) for name in COUNTS}
    # The fewest too: a step that executed nothing would be as wrong as one that executed twice.
    run.in_step["fewest_executions"] = min(step["executions"] for step in snapshots.steps)
    run.logged_transfers = max(step["transfers_to_host"] for step in snapshots.logged)
    run.losses = snapshots.losses
    return run


def measure(architecture: zoo.Architecture, trainer: str, steps: int, timeout: float) -> Run:
    """Trains in a child; if it crashes, the row has the error."""
    outcome = run_in_child(functools.partial(train, architecture, trainer, steps), timeout=timeout)
    return outcome.value if outcome.ok else Run(architecture.name, trainer, error=outcome.short_error)


def table_of(runs: list[Run]) -> str:
    """The runs as a table, followed by errors."""
    headers = ["model", "trainer"]
    for where in ("in all", "per step", "in the step"):
        headers += [
            f"{what} {where}" if what == "compiles" else what for what in ("compiles", "exec", "to host", "eager")
        ]
    rows = []
    for run in runs:
        row: list[object] = [run.model, run.trainer]
        for counts in (run.in_all, run.per_step, run.in_step):
            row += [counts.get(name) for name in COUNTS]
        rows.append(row)
    crashed = [f"  {run.model}, {run.trainer}: crashed: {run.error}" for run in runs if run.error]
    return report.table(headers, rows) + ("\n" + "\n".join(crashed) if crashed else "")


def add_targets(made: report.Report, runs: list[Run]) -> None:
    """Adds our targets; a run that crashed misses all of them."""
    for run in runs:
        if run.trainer != OURS:
            continue
        made.target(f"{run.model}: compiles in all", run.in_all.get("compiles"), "exactly", 1)
        made.target(f"{run.model}: most executions in a step", run.in_step.get("executions"), "exactly", 1)
        made.target(f"{run.model}: fewest executions in a step", run.in_step.get("fewest_executions"), "exactly", 1)
        made.target(f"{run.model}: most transfers to the host per logged step", run.logged_transfers, "at most", 1)
        made.target(f"{run.model}: most eager operations in a step", run.in_step.get("eager_ops"), "exactly", 0)


def main(command: list[str] | None = None) -> int:
    """The program."""
    parser = report.parser(str(__doc__).splitlines()[0])
    parser.add_argument("--models", default=MODELS, metavar="NAMES", help="comma-separated parts of names in the zoo")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--timeout", type=float, default=300, help="seconds per run")
    parser.add_argument("--lightning", action="store_true", help="Lightning's Trainer instead, on a small classifier")
    options = parser.parse_args(command)
    if options.lightning:
        # Lightning is not among what the comparison of transformers' Trainer needs.
        from benchmarks import lightning_counts

        if options.steps < lightning_counts.LEAST_STEPS:
            parser.error(f"--lightning takes at least {lightning_counts.LEAST_STEPS} steps")
        return lightning_counts.report_on(options)
    chosen = zoo.named(options.models)
    for architecture in chosen:
        architecture.load_classes()
    runs = []
    for number, architecture in enumerate(chosen):
        # The crash is the same for every model: one row shows it.
        for trainer in (STOCK_DEFAULT, STOCK, OURS) if number == 0 else (STOCK, OURS):
            runs.append(measure(architecture, trainer, options.steps, options.timeout))
            print(f"{architecture.name}, {trainer}: done", file=sys.stderr, flush=True)
    made = report.Report("step_counts", settings={"steps": options.steps, "logging_steps": 1})
    made.results["runs"] = [asdict(run) for run in runs]
    add_targets(made, runs)
    print(str(__doc__).split("\n\n", 1)[1])
    print(f"{options.steps} steps, logging at every step\n")
    print(table_of(runs))
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
