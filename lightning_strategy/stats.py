"""`XLAStatsCallback`: what a training costs, for its loggers and as a closing summary."""

from __future__ import annotations

import sys
from typing import Any

import lightning as L

from xla_adapters.batches import sample_count, token_count
from xla_adapters.run_stats import RunStats


class XLAStatsCallback(L.Callback):
    """Logs what training steps cost, and prints the whole when the training ends.

    Every `log_every_n_steps` optimizer steps all loggers of the Trainer get, of the steps since the last
    time and of what ran between them: `xla/compiles`, `xla/executions`, `xla/executions_per_step`, and,
    without the time spent compiling, `xla/seconds_per_step` and `xla/tokens_per_second` (or
    `xla/samples_per_second`, if the batches have no `input_ids`). Only then is the device waited for.

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
        # Not a remainder: under accumulation a step lasts several batches, with several optimizers a batch is
        # several steps.
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
