"""The trainer's own callbacks: the edges of the step, and the closing summary."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from xla_adapters.run_stats import RunStats

if TYPE_CHECKING:
    from hf_trainer.mixin import XLATrainerMixin


class FirstCallback(TrainerCallback):
    """Stands before all others, so that these find the step executed."""

    def __init__(self, trainer: XLATrainerMixin) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer.weights_are_loaded()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer.close_update()

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer.close_substep()


class LastCallback(TrainerCallback):
    """Stands behind all others, to see what they decided."""

    def __init__(self, trainer: XLATrainerMixin) -> None:
        self._trainer = trainer

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._trainer.step_is_done(control)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if control.should_epoch_stop or control.should_training_stop:
            self._trainer.drop_open_step()


class XLAStatsCallback(TrainerCallback):
    """Prints what a training cost when it ends: compiles, executions per step, throughput.

    Attributes:
        stats: the numbers; the trainer it is given to fills them in.
    """

    def __init__(self) -> None:
        self.stats = RunStats()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.stats.stop()
        if state.is_world_process_zero:
            print(f"\nwhat the training cost\n{self.stats.summary()}", file=sys.stderr)
