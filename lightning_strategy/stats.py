"""`XLAStatsCallback`: compiles, executions and speed of a training, for its loggers and as a summary at its end."""

from __future__ import annotations

import sys
from typing import Any

import lightning as L

from xla_adapters.data.batches import sample_count, token_count
from xla_adapters.insight.run_record import RunStats


class XLAStatsCallback(L.Callback):
    """Logs compiles, executions and speed of training steps, and prints a summary when the training ends.

    Every `log_every_n_steps` optimizer steps it logs to all loggers of the Trainer. The values are about the time since
    the last log, with everything that ran in it: `xla/compiles`, `xla/executions`, `xla/executions_per_step`, and,
    without the time spent compiling, `xla/seconds_per_step` and `xla/tokens_per_second` (or `xla/samples_per_second`,
    if the batches have no `input_ids`). It waits for the device only then.

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
