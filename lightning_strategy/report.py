"""What a fit's time goes to, and what it costs: for loggers, for the files of the run, and as a summary."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from inspect import isfunction
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn

from xla_adapters.config import check_choice
from xla_adapters.data.batches import sample_count, token_count
from xla_adapters.insight.run_record import RunRecord, RunStats, about
from xla_adapters.insight.times import CALLBACKS, EVALUATION, INPUT, OTHER, SETUP, STEP, WallClock
from xla_adapters.loop.steps import StepDriver
from xla_adapters.utils.patching import replaced


class XLAStatsCallback(L.Callback):
    """Logs compiles, executions and speed of training steps, and prints a summary when the training ends.

    Every `log_every_n_steps` optimizer steps it logs to all loggers of the Trainer. The values are about the time since
    the last log, with everything that ran in it: `xla/compiles`, `xla/executions`, `xla/executions_per_step`, and
    `xla/seconds_per_step` and `xla/tokens_per_second` (or `xla/samples_per_second`, if the batches have no `input_ids`)
    as in the report of the run. It waits for the device only then.

    Attributes:
        stats: the numbers of the whole training.
    """

    def __init__(self) -> None:
        self.stats = RunStats()
        self._first_step = 0
        self._logged_at = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begins to count."""
        self._first_step = self._logged_at = trainer.global_step
        report = getattr(trainer.strategy, "_report", None)
        # Of other strategies nothing divides the time.
        self.stats.wall = report.clock if isinstance(report, FitReport) else None
        self.stats.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts the batch; logs when it is time to."""
        self.stats.count_batch(samples=sample_count(batch), tokens=token_count(batch))
        self.stats.steps = trainer.global_step - self._first_step
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        # Not a remainder of the step: with accumulation several batches have the same step, with several optimizers a
        # batch adds several steps.
        if trainer.loggers and every > 0 and trainer.global_step - self._logged_at >= every:
            self._logged_at = trainer.global_step
            self._log(trainer)

    def _log(self, trainer: L.Trainer) -> None:
        totals = self.stats.lap()
        values = {name: totals[name] for name in ("compiles", "executions", "executions_per_step")}
        values["seconds_per_step"] = 1 / totals["steps_per_second"]
        rate = "tokens_per_second" if "tokens_per_second" in totals else "samples_per_second"
        if rate in totals:
            values[rate] = totals[rate]
        for logger in trainer.loggers:
            logger.log_metrics({f"xla/{name}": value for name, value in values.items()}, step=trainer.global_step)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Prints the summary."""
        self.stats.stop()
        if trainer.is_global_zero:
            print(f"\nwhat the training cost\n{self.stats.summary()}", file=sys.stderr)


class FitReport:
    """The `RunRecord` of a strategy.

    Args:
        wanted: whether time is recorded and files are written; `"log"` for loggers, too.

    Attributes:
        record: of the last fit.
        wanted: as given.

    Raises:
        ConfigError: `wanted` is none of these.
    """

    def __init__(self, wanted: bool | Literal["log"] = True) -> None:
        check_choice("xla_report", wanted, (True, False, "log"))
        self.record = RunRecord(RunStats(), enabled=bool(wanted))
        self.wanted = wanted
        self._updates = 0
        self._has_begun = False

    @property
    def clock(self) -> WallClock:
        """Divides the wall time of the fit."""
        return self.record.clock

    def running(
        self,
        trainer: Trainer,
        steps: StepDriver,
        plan: Callable[[], str],
        shapes: Callable[[], list[dict[str, Any]]],
    ) -> AbstractContextManager[None]:
        """Around a fit: at the exit the files are written. Other runs are not recorded.

        Args:
            trainer: runs the loops.
            steps: of the run.
            plan: how the module is sharded, in words; empty if it is not.
            shapes: of batches that have few.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            return nullcontext()
        return self._fit(trainer, steps, plan, shapes)

    @contextmanager
    def _fit(
        self,
        trainer: Trainer,
        steps: StepDriver,
        plan: Callable[[], str],
        shapes: Callable[[], list[dict[str, Any]]],
    ) -> Iterator[None]:
        self._updates, self._has_begun = _updates(trainer.fit_loop.epoch_loop), False
        kind = type(trainer.strategy).__name__
        with ExitStack() as stack:
            stack.enter_context(
                self.record.running(
                    about(trainer.lightning_module, f"Trainer with {kind}"),
                    programs=lambda: steps.programs,
                    training=lambda: [steps.train, steps.update],
                    folder=_folder(trainer),
                    plan=plan,
                    shapes=shapes,
                )
            )
            if self.record.enabled:
                stack.enter_context(self._timed_hooks(trainer))
                stack.enter_context(_timed_input(trainer, self.clock))
                if self.wanted == "log":
                    stack.enter_context(self._logged(trainer))
            yield

    # ---- events of the loops -------------------------------------------------------------------

    def batch_begins(self) -> None:
        """A training batch is on the device, and its step begins."""
        if not self._has_begun:
            self._has_begun = True
            self.record.setup_ended()
        self.clock.switch(STEP)

    def step_ended(self) -> None:
        """A step was executed."""
        self.clock.end(STEP)

    def _batch_ended(self, trainer: Trainer, batch: Any) -> None:
        """The step of a training batch has ended, and so have the callbacks after it."""
        record = self.record
        record.stats.samples += sample_count(batch)
        record.stats.tokens += token_count(batch)
        updates = _updates(trainer.fit_loop.epoch_loop)
        if updates != self._updates:
            self._updates = updates
            record.stats.steps += 1
            record.step_ended()

    def evaluation_begins(self) -> None:
        """A validation begins."""
        self.clock.switch(EVALUATION)

    def evaluation_ended(self) -> None:
        """A validation has ended; the first one is before the training."""
        self.clock.switch(OTHER if self._has_begun else SETUP)

    # ---- patches -------------------------------------------------------------------------------

    @contextmanager
    def _logged(self, trainer: Trainer) -> Iterator[None]:
        """Until the exit, what the Trainer logs of training steps also says what the time goes to, as `xla/...`."""
        kind: Any = type(trainer._logger_connector)
        stock = kind.log_metrics

        def log_metrics(connector: Any, metrics: dict[str, Any], step: int | None = None) -> None:
            logs = connector is trainer._logger_connector and metrics and trainer.loggers and step is None
            if logs and trainer.training and not _logs_already(trainer):
                scalars = self.record.scalars()
                metrics = {**metrics, **{f"xla/{name}": value for name, value in scalars.items()}}
            stock(connector, metrics, step)

        with replaced(kind, "log_metrics", log_metrics):
            yield

    @contextmanager
    def _timed_hooks(self, trainer: Trainer) -> Iterator[None]:
        """Until the exit, the time of callbacks and of the user's hooks of the module is counted as theirs."""
        clock, transfers = self.clock, self.record.transfers
        callbacks, hooks = call._call_callback_hooks, call._call_lightning_module_hook
        own = _own_hooks([trainer.lightning_module], LightningModule)
        timed = _own_hooks(trainer.callbacks, Callback) | {"on_train_batch_end"}  # type: ignore[attr-defined]

        @functools.wraps(callbacks)
        def call_callbacks(caller: Trainer, hook: str, *args: Any, **kwargs: Any) -> None:
            if hook not in timed or caller is not trainer:
                callbacks(caller, hook, *args, **kwargs)
                return
            is_end = hook == "on_train_batch_end"
            if is_end:
                # Where a step is no graph, nothing else says that it has ended.
                clock.end(STEP)
            # Without `during`, whose object and calls cost more than the two switches.
            before = clock.switch(CALLBACKS)
            try:
                if transfers.looks:
                    transfers.looked_through(callbacks, caller, hook, *args, **kwargs)
                else:
                    callbacks(caller, hook, *args, **kwargs)
            finally:
                clock.switch(before)
            if is_end:
                self._batch_ended(trainer, args[1])

        @functools.wraps(hooks)
        def call_hook(caller: Trainer, hook: str, *args: Any, **kwargs: Any) -> Any:
            if hook not in own or caller is not trainer:
                return hooks(caller, hook, *args, **kwargs)
            before = clock.switch(CALLBACKS)
            try:
                if transfers.looks:
                    return transfers.looked_through(hooks, caller, hook, *args, **kwargs)
                return hooks(caller, hook, *args, **kwargs)
            finally:
                clock.switch(before)

        with replaced(call, "_call_callback_hooks", call_callbacks), ExitStack() as stack:
            if own:
                stack.enter_context(replaced(call, "_call_lightning_module_hook", call_hook))
            yield


def _own_hooks(objects: Iterable[Any], base: type) -> frozenset[str]:
    """The `on_` hooks that modules or callbacks define: Lightning calls the other ones too, several in each step.

    Hooks of other names are parts of the step: `training_step`, `optimizer_step`, `configure_gradient_clipping`.

    Args:
        objects: the module, or the callbacks.
        base: the class whose hooks do nothing.
    """
    stock = [name for name in dir(base) if name.startswith("on_") and isfunction(getattr(base, name))]
    return frozenset(
        name
        for item in objects
        for name in stock
        if getattr(getattr(item, name), "__func__", None) is not getattr(base, name)
    )


def _updates(loop: Any) -> int:
    """How often the optimizers were stepped: `trainer.global_step`, which Lightning finds through ten properties."""
    automatic: int = loop.automatic_optimization.optim_progress.optimizer.step.total.completed
    manual: int = loop.manual_optimization.optim_step_progress.total.completed
    return automatic + manual


def _logs_already(trainer: Trainer) -> bool:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return any(isinstance(callback, XLAStatsCallback) for callback in callbacks)


def _folder(trainer: Trainer) -> Path | None:
    """Where the files of a fit go: the logger's folder, or a `default_root_dir` with a folder of checkpoints.

    Nowhere else are files expected: not in a `default_root_dir` that gets neither logs nor checkpoints, nor in the
    working directory. Whoever lists a folder of checkpoints takes every file in it for one.
    """
    folder = trainer.log_dir
    if folder is None or "://" in str(folder) or not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return None
    callbacks = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
    # Without a folder Lightning saves below `default_root_dir`.
    saves = [Path(folder, one.dirpath or "checkpoints").resolve() for one in callbacks]
    root = Path(folder).resolve()
    is_expected = bool(trainer.loggers) or any(root in saved.parents for saved in saves)
    return Path(folder) if is_expected and root not in (Path.cwd(), *saves) else None


@contextmanager
def _timed_input(trainer: Trainer, clock: WallClock) -> Iterator[None]:
    """Until the exit, the time in which the fit waits for its data is counted as such."""
    kind: Any = type(trainer.fit_loop.epoch_loop)
    before_fetch, after_fetch = kind._on_before_fetch, kind._on_after_fetch
    # What the loop did before.
    doing = OTHER

    # With the methods' names, by which a fetcher that refers to them is pickled.
    @functools.wraps(before_fetch)
    def before(loop: Any) -> None:
        nonlocal doing
        if loop is trainer.fit_loop.epoch_loop:
            doing = clock.switch(INPUT)
        before_fetch(loop)

    @functools.wraps(after_fetch)
    def after(loop: Any) -> None:
        after_fetch(loop)
        if loop is trainer.fit_loop.epoch_loop:
            clock.switch(doing)

    with replaced(kind, "_on_before_fetch", before), replaced(kind, "_on_after_fetch", after):
        yield
