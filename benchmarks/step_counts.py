"""Device counters per training step, of transformers' Trainer and ours; `python -m benchmarks.step_counts`.

Both train the same tiny models on the same batches, in lazy mode (stock) and `eager+compile` (ours), and log at every
step, each in its own process. Counted are graphs compiled and executed, copies from the device to the host, and
operations executed eagerly:
  compiles     in the whole of `train()`;
  per step     from the begin of the first step to the log of the last one, divided by the steps;
  in the step  from `on_step_begin` to `on_step_end`, the step with most of each: logging is outside.

With `--lightning`, Lightning's Trainer instead: see `benchmarks.lightning_counts`.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import transformers

import hf_trainer
from benchmarks import report, zoo
from benchmarks.training import Batches, arguments, only_item
from tests.children import run_in_child
from xla_adapters import count, get_runtime, initialize
from xla_adapters.runtime import Metrics

MODELS = "gpt-2,llama,bert (padded)"
COUNTS = ("compiles", "executions", "transfers_to_host", "eager_ops")
STOCK_DEFAULT, STOCK, OURS = "transformers, its defaults", "transformers, adamw_torch", "hf_trainer"


@dataclass
class Run:
    """One training: the counts, or why there are none.

    Attributes:
        what, trainer: what was trained, and by which trainer.
        compiles: in all.
        per_step, most, fewest: of steps.
        logged_transfers: most copies to the host in a step with its log.
        after_exit: after an exception that `training_step` raised.
        losses, difference: those logged, and how far they are from the plain CPU's.
    """

    what: str
    trainer: str
    compiles: float | None = None
    per_step: dict[str, float] = field(default_factory=dict)
    most: dict[str, float] = field(default_factory=dict)
    fewest: dict[str, float] = field(default_factory=dict)
    logged_transfers: float | None = None
    after_exit: dict[str, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    difference: float | None = None
    error: str | None = None

    def take(self, steps: Sequence[dict[str, float]]) -> None:
        """Takes the counts of each step."""
        self.per_step = {name: sum(step[name] for step in steps) / len(steps) for name in COUNTS}
        self.most = {name: max(step[name] for step in steps) for name in COUNTS}
        # A step that executed nothing would be as wrong as one that executed twice.
        self.fewest = {name: min(step[name] for step in steps) for name in COUNTS}


class Meter:
    """Reads the counters. Reading them moves no data.

    Attributes:
        began: where the step began, if one is under way.
    """

    def __init__(self) -> None:
        self.began: Metrics | None = None

    def begin(self) -> None:
        """A step begins."""
        self.began = get_runtime().counters.metrics()

    def so_far(self, since: Metrics | None = None) -> dict[str, float]:
        """The counts since the step, or another reading."""
        older, newer = asdict(since or self.began), asdict(get_runtime().counters.metrics())  # type: ignore[arg-type]
        return {name: newer[name] - older[name] for name in newer}


class CountedSteps(transformers.TrainerCallback):
    """Counts each step.

    Attributes:
        steps: from `on_step_begin` to `on_step_end`.
        logged: from there to the log of the loss.
        in_all: from the first step to the last log.
        losses: those logged.
    """

    def __init__(self) -> None:
        self.meter = Meter()
        self.first: Metrics | None = None
        self.steps: list[dict[str, float]] = []
        self.logged: list[dict[str, float]] = []
        self.losses: list[float] = []
        self.in_all: dict[str, float] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.meter.begin()
        self.first = self.first or self.meter.began

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append(self.meter.so_far())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.logged.append(self.meter.so_far())
            self.in_all = self.meter.so_far(self.first)
            self.losses.append(float(logs["loss"]))


def train(architecture: zoo.Model, trainer: str, steps: int) -> Run:
    """Runs in a child."""
    initialize(eager=False)
    run, counted = Run(architecture.name, trainer), CountedSteps()
    options: dict[str, Any] = {"optim": "adamw_torch"} if trainer == STOCK else {}
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {
            "model": architecture.seeded(),
            "args": arguments(folder, **options),
            "train_dataset": Batches(architecture.batches(steps)),
            "data_collator": only_item,
            "callbacks": [counted],
        }
        if trainer == OURS:
            made = hf_trainer.Trainer(**common, xla_mode="eager+compile", on_graph_break="error")
        else:
            made = transformers.Trainer(**common)
        with count() as counters:
            made.train()
    run.compiles = counters.compiles
    run.take(counted.steps)
    run.per_step = {name: counted.in_all[name] / len(counted.steps) for name in COUNTS}
    run.logged_transfers = max(step["transfers_to_host"] for step in counted.logged)
    run.losses = counted.losses
    return run


def measure(architecture: zoo.Model, trainer: str, steps: int, timeout: float) -> Run:
    """Trains in a child; if it crashes, the row has the error."""
    outcome = run_in_child(functools.partial(train, architecture, trainer, steps), timeout=timeout)
    return outcome.value if outcome.ok else Run(architecture.name, trainer, error=outcome.short_error)


def table_of(runs: list[Run], of: str = "model") -> str:
    """The runs as a table, followed by errors.

    Args:
        runs: the rows.
        of: what was trained.
    """
    headers = [of, "trainer", "compiles", "exec per step", "to host", "eager", "exec in the step", "to host", "eager"]
    headers += ["exec after exit", "compiles after exit", "difference"]
    rows = [
        [
            *(run.what, run.trainer, run.compiles),
            *(counts.get(name) for counts in (run.per_step, run.most) for name in COUNTS[1:]),
            *(run.after_exit.get(name) for name in ("executions", "compiles")),
            run.difference,
        ]
        for run in runs
    ]
    crashed = [f"  {run.what}, {run.trainer}: crashed: {run.error}" for run in runs if run.error]
    return "\n".join([report.table(headers, rows), *crashed])


def add_targets(made: report.Report, run: Run, graphs: int = 1) -> None:
    """Adds the targets of one of our runs; a run that crashed misses all of them."""
    made.target(f"{run.what}: compiles in all", run.compiles, "exactly", graphs)
    made.target(f"{run.what}: most executions in a step", run.most.get("executions"), "exactly", 1)
    made.target(f"{run.what}: fewest executions in a step", run.fewest.get("executions"), "exactly", 1)
    transfers = run.logged_transfers
    made.target(f"{run.what}: most transfers to the host per logged step", transfers, "at most", 1)
    made.target(f"{run.what}: most eager operations in a step", run.most.get("eager_ops"), "exactly", 0)


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
        architecture.prepare()
    made = report.Report("step_counts", settings={"steps": options.steps, "logging_steps": 1})
    runs = []
    for number, architecture in enumerate(chosen):
        # The crash is the same for every model: one row shows it.
        for trainer in (STOCK_DEFAULT, STOCK, OURS) if number == 0 else (STOCK, OURS):
            runs.append(measure(architecture, trainer, options.steps, options.timeout))
            print(f"{architecture.name}, {trainer}: done", file=sys.stderr, flush=True)
            if trainer == OURS:
                add_targets(made, runs[-1])
    made.results["runs"] = [asdict(run) for run in runs]
    print(str(__doc__).split("\n\n", 1)[1])
    print(f"{options.steps} steps, logging at every step\n\n{table_of(runs)}")
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
