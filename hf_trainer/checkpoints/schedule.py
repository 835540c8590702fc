"""`CheckpointSchedule`: when `CheckpointConfig` has a checkpoint saved, and the end of a training after a signal."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers
from transformers import TrainerControl
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_trainer.checkpoints.safe import SafeCheckpoints
from hf_trainer.step_driver import StepDriver
from xla_adapters import get_runtime
from xla_adapters.checkpoint import CheckpointConfig, Preemption, SaveSchedule

_log = logging.getLogger(__name__)


class CheckpointSchedule:
    """Saves checkpoints when they are due, and before a signal ends the process.

    Args:
        trainer: the trainer.
        base: the methods that the mixin overrides.
        config: when to save.
        steps: mention the newest checkpoint in their errors.
        checkpoints: waits for a save in the background.
    """

    _preemption: Preemption
    _schedule: SaveSchedule

    def __init__(
        self,
        trainer: transformers.Trainer,
        base: Any,
        config: CheckpointConfig,
        steps: StepDriver,
        checkpoints: SafeCheckpoints,
    ) -> None:
        self._trainer = trainer
        self._base = base
        self._config = config
        self._steps = steps
        self._checkpoints = checkpoints
        # Steps done and entries logged at the last save. A later evaluation adds an entry that is not saved.
        self._saved_at = (-1, -1)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Around a training: starts its schedule, and handles signals under `save_on="preemption"`."""
        self._preemption = Preemption(self._config, also=get_runtime().device.preemption_sync_point())
        self._schedule = SaveSchedule(self._config, preemption=self._preemption)
        if self._config.save_on == "preemption":
            with self._preemption:
                yield
        else:
            yield

    def step_is_done(self, control: TrainerControl) -> None:
        """An optimizer step and its callbacks are done: asks the loop for a checkpoint if one is due."""
        if self._schedule.due(self._trainer.state.global_step) is not None:
            control.should_save = True

    def saved(self, trial: Any) -> None:
        """A checkpoint was saved, or is being saved in the background."""
        state = self._trainer.state
        self._schedule.saved(state.global_step)
        folder = os.path.join(self._base._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        self._steps.train.note_checkpoint(folder)
        self._saved_at = (state.global_step, len(state.log_history))

    def save_before_evaluation(self, model: Any, trial: Any) -> None:
        """Saves if the training is to end: the evaluation may take longer than the time that is left."""
        trainer = self._trainer
        if self._preemption.can_still_save(trainer.state.global_step) and trainer.control.should_evaluate:
            trainer._save_checkpoint(model, trial)

    def end_if_asked(self, model: Any, trial: Any) -> None:
        """Saves and ends the process if a signal asked for it.

        Raises:
            SystemExit: with the exit status of the config.
        """
        if not self._preemption.requested:
            return
        state = self._trainer.state
        step = state.global_step
        if self._saved_at != (step, len(state.log_history)):
            if self._preemption.can_still_save(step):
                self._trainer._save_checkpoint(model, trial)
            else:
                _log.warning("the time to save has passed: the training ends after step %d unsaved", step)
        self._checkpoints.settle()
        _log.warning("the training ends after step %d, as a signal asked", step)
        raise SystemExit(self._preemption.exit_code)
