"""Device counters per training step of Lightning, stock and ours; `python -m benchmarks.step_counts --lightning`.

Both fit the same small classifier on the same batches and log every loss: Lightning's SingleDeviceXLAStrategy without
its check for a TPU (stock), and XLAEagerStrategy (ours), each in its own process. Counted are graphs compiled and
executed, copies from the device to the host, and operations executed eagerly:
  compiles    in the whole of `fit`, including setup and teardown;
  per step    from the start of a training batch to the start of the next one, or of the validation, or to the end of
              the epoch: with its logging and the next upload, without Lightning's reads as it loads validation data.
              A step is a batch;
  after exit  where `training_step` raises: from the begin of that batch until `fit` has raised;
  difference  the largest between a logged loss and that of the plain CPU.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import report
from benchmarks.step_counts import Meter, Run, add_targets, table_of
from benchmarks.timed_trainers import stock_on_xla
from lightning_strategy import XLAEagerStrategy
from tests.children import run_in_child
from tests.programs.program import Logged
from xla_adapters import count, initialize

CPU, STOCK, OURS = "plain CPU", "SingleDeviceXLAStrategy", "XLAEagerStrategy"
FEATURES, CLASSES, ROWS = 16, 4, 8
FAILS_AT = 3
LEAST_STEPS = FAILS_AT + 1
TOLERANCE = 2e-6


@dataclass(frozen=True)
class Scenario:
    """One way to train.

    Attributes:
        name: in the table.
        graphs: that ours may compile.
        options: of the Trainer, but for what all have.
        validation_batches: per epoch; none of them is no validation.
        fails: whether `training_step` raises at batch `FAILS_AT`.
        shown: values logged to the progress bar beside the loss.
    """

    name: str
    graphs: int
    options: dict[str, Any] = field(default_factory=dict)
    validation_batches: tuple[int, ...] = ()
    fails: bool = False
    shown: int = 0


SCENARIOS = (
    Scenario("logged every step", 1),
    Scenario("4 values on a progress bar redrawn every step", 1, {"enable_progress_bar": True}, shown=4),
    Scenario(
        "validation every 3 steps, 2 then 4 batches",
        2,
        {"max_epochs": 2, "val_check_interval": 3, "reload_dataloaders_every_n_epochs": 1},
        validation_batches=(2, 4),
    ),
    Scenario("accumulation of 2", 2, {"accumulate_grad_batches": 2}),
    Scenario("accumulation of 4", 3, {"accumulate_grad_batches": 4}),
    Scenario(f"exception in batch {FAILS_AT}", 1, fails=True),
)


class InTrainingStepError(Exception):
    """Raised in the middle of a training step."""


class Classifier(L.LightningModule):
    """Two layers; logs every loss.

    Args:
        fails, shown: see `Scenario`.
        before_validation: called before Lightning prepares a validation.
    """

    def __init__(self, fails: bool, shown: int, before_validation: Callable[[], None]) -> None:
        super().__init__()
        self._fails = fails
        self._shown = shown
        self._before_validation = before_validation
        self.net = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES))

    def _loss(self, batch: Any) -> torch.Tensor:
        inputs, classes = batch
        return nn.functional.cross_entropy(self.net(inputs), classes)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.log("loss", loss)
        for number in range(self._shown):
            self.log(f"shown {number}", loss * number, prog_bar=True, logger=False)
        if self._fails and batch_idx == FAILS_AT:
            raise InTrainingStepError
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def on_validation_model_zero_grad(self) -> None:
        # The first hook of a validation: `on_validation_start` comes after its data is loaded.
        self._before_validation()
        super().on_validation_model_zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Data(L.LightningDataModule):
    """The same rows in every run.

    Args:
        steps: batches of training per epoch.
        validation_batches: see `Scenario`.
    """

    def __init__(self, steps: int, validation_batches: tuple[int, ...]) -> None:
        super().__init__()
        self._steps = steps
        self._validation_batches = validation_batches

    def train_dataloader(self) -> DataLoader[Any]:
        return _batches(self._steps, seed=0)

    def val_dataloader(self) -> Any:
        if not self._validation_batches:
            return []
        assert self.trainer is not None
        return _batches(self._validation_batches[self.trainer.current_epoch], seed=1)


def _batches(number: int, seed: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(number * ROWS, FEATURES, generator=generator)
    classes = torch.randint(0, CLASSES, (number * ROWS,), generator=generator)
    return DataLoader(TensorDataset(inputs, classes), batch_size=ROWS)


class CountedSteps(L.Callback):
    """Counts each step.

    Attributes:
        steps: one entry per finished step.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.meter = Meter()

    def end(self) -> None:
        """A step ends here, if one is under way."""
        if self.meter.began is not None:
            self.steps.append(self.meter.so_far())
            self.meter.began = None

    def on_train_batch_start(self, *_: Any) -> None:
        self.end()
        self.meter.begin()

    def on_train_epoch_end(self, *_: Any) -> None:
        self.end()


def train(scenario: Scenario, strategy: str, steps: int) -> Run:
    """Runs in a child."""
    if strategy != CPU:
        initialize(eager=False)
    run, logged, counted = Run(scenario.name, strategy), Logged(), CountedSteps()
    L.seed_everything(0, verbose=False)
    options: dict[str, Any] = {
        "max_epochs": 1,
        "log_every_n_steps": 1,
        "logger": logged,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        **scenario.options,
    }
    whole = scenario.options.get("accumulate_grad_batches", 1)
    data = Data(-(-steps // whole) * whole, scenario.validation_batches)
    fit = functools.partial(_fit, scenario, Classifier(scenario.fails, scenario.shown, counted.end), data)
    if strategy == CPU:
        fit(L.Trainer(accelerator="cpu", **options))
    else:
        # To construct ours makes the process eager.
        chosen: dict[str, Any] = stock_on_xla() if strategy == STOCK else {"strategy": XLAEagerStrategy()}
        trainer = L.Trainer(callbacks=[counted], **chosen, **options)
        with count() as counters:
            fit(trainer)
            if scenario.fails:
                run.after_exit = counted.meter.so_far()
        run.compiles = counters.compiles
        run.take(counted.steps)
        run.logged_transfers = run.most["transfers_to_host"]
    run.losses = [value for values in logged.values for name, value in values.items() if name.endswith("loss")]
    return run


def _fit(scenario: Scenario, module: Classifier, data: Data, trainer: L.Trainer) -> None:
    try:
        trainer.fit(module, datamodule=data)
    except InTrainingStepError:
        assert scenario.fails
    else:
        assert not scenario.fails


def compare(run: Run, plain: Run) -> None:
    """Sets the difference of the losses; there is none where one of the runs logged fewer."""
    if run.losses and len(run.losses) == len(plain.losses):
        run.difference = max(abs(one - other) for one, other in zip(run.losses, plain.losses, strict=True))


def measure(steps: int, timeout: float, say: Callable[[str], None]) -> list[Run]:
    """Every scenario under both strategies; a crash in a child is the row."""
    runs = []
    for scenario in SCENARIOS:
        plain = None
        for strategy in (CPU, STOCK, OURS):
            outcome = run_in_child(functools.partial(train, scenario, strategy, steps), timeout=timeout)
            run = outcome.value if outcome.ok else Run(scenario.name, strategy, error=outcome.short_error)
            say(f"{scenario.name}, {strategy}: done")
            if plain is None:
                plain = run
                continue
            compare(run, plain)
            runs.append(run)
    return runs


def report_on(options: argparse.Namespace) -> int:
    """The program, with the options of `benchmarks.step_counts`."""
    runs = measure(options.steps, options.timeout, lambda line: print(line, file=sys.stderr, flush=True))
    made = report.Report("lightning_counts", settings={"steps": options.steps, "log_every_n_steps": 1})
    made.results["runs"] = [asdict(run) for run in runs]
    add_all_targets(made, runs)
    print(str(__doc__).split("\n\n", 1)[1])
    print(f"{options.steps} steps an epoch (with accumulation, whole updates), logging at every step\n")
    print(table_of(runs, "scenario"))
    return made.finish(options)


def add_all_targets(made: report.Report, runs: list[Run]) -> None:
    """Adds our targets; a run that crashed misses all of them."""
    scenarios = {scenario.name: scenario for scenario in SCENARIOS}
    for run in runs:
        if run.trainer != OURS:
            continue
        scenario = scenarios[run.what]
        add_targets(made, run, scenario.graphs)
        made.target(f"{run.what}: difference to the plain CPU", run.difference, "at most", TOLERANCE)
        for count_of in ("executions", "compiles") if scenario.fails else ():
            made.target(f"{run.what}: {count_of} after the exit", run.after_exit.get(count_of), "exactly", 0)
