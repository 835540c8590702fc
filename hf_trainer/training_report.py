"""`TrainingReport`: what a trainer's time goes to, for its logs and for the files in its output folder."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import transformers

from hf_trainer.model_sharding import ModelSharding
from hf_trainer.placement import model_of
from hf_trainer.step_driver import StepDriver
from xla_adapters.insight.run_record import RunRecord, RunStats, about
from xla_adapters.insight.times import WallClock


class TrainingReport:
    """The `RunRecord` of a trainer.

    Args:
        trainer: the trainer.
        stats: counts its steps, samples and tokens.
        enabled: whether time is recorded and logged, and files are written.

    Attributes:
        record: of the last training.
    """

    def __init__(self, trainer: transformers.Trainer, stats: RunStats, *, enabled: bool) -> None:
        self._trainer = trainer
        self.record = RunRecord(stats, enabled=enabled)

    @property
    def clock(self) -> WallClock:
        """Divides the wall time of the training."""
        return self.record.clock

    def training(self, steps: StepDriver, sharding: ModelSharding) -> AbstractContextManager[None]:
        """Around a training; at the exit the files are written."""
        trainer = self._trainer
        return self.record.running(
            about(model_of(trainer), type(trainer).__name__),
            programs=lambda: [steps.train, steps.evaluation, steps.generation],
            training=lambda: [steps.train],
            folder=self._folder(),
            plan=sharding.summary,
        )

    def _folder(self) -> Path | None:
        folder = self._trainer.args.output_dir
        if not self._trainer.is_world_process_zero() or folder is None or "://" in str(folder):
            return None
        return Path(folder)

    def saving(self) -> AbstractContextManager[None]:
        """Around the save of a checkpoint."""
        step = self._trainer.state.global_step
        return self.record.saving(step, str(Path(str(self._trainer.args.output_dir)) / f"checkpoint-{step}"))

    def add_to(self, logs: dict[str, Any]) -> None:
        """Adds to what the trainer is about to log of its training: `xla/goodput` and others.

        Only where something is reported to: without, they would be in the terminal and in `log_history` alone, where
        runs are compared.
        """
        if "loss" in logs and self._trainer.args.report_to:
            logs.update({f"xla/{name}": float(f"{value:.4g}") for name, value in self.record.scalars().items()})
