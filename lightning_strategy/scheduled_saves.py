"""`ScheduledSaves`: what `CheckpointConfig` has saved, and what a signal does; stands behind all other callbacks."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_strategy.checkpoints import XLAEagerCheckpointIO
from xla_adapters import get_backend
from xla_adapters.checkpoint import CheckpointConfig, Preemption, SaveSchedule
from xla_adapters.errors import UnsupportedOptionError

# `ckpt_path="last"` looks for names that begin with "last".
NAME = "last-xla_adapters.ckpt"
_log = logging.getLogger(__name__)


class ScheduledSaves(Callback):
    """Saves between steps when it is due, under one name, beside the checkpoints of the first ModelCheckpoint.

    Args:
        config: when.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self._preemption = Preemption(config, also=get_backend().preemption_sync_point())
        self._schedule = SaveSchedule(config, preemption=self._preemption)
        self._lasting = ExitStack()
        # What was saved last holds everything up to now.
        self._is_saved = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Signals are noted from here on, beside Lightning's own handler."""
        if self._config.save_on == "preemption":
            self._lasting.enter_context(self._preemption)

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """A step may be done."""
        self._is_saved = False
        _tidy(trainer)
        if trainer.fit_loop._should_accumulate():
            return
        if self._schedule.due(trainer.global_step) is not None:
            self._save(trainer)
        self._perhaps_end(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """An evaluation is done; a signal may have come meanwhile."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._is_saved = False
            self._perhaps_end(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As after an evaluation."""
        self._perhaps_end(trainer)

    def _perhaps_end(self, trainer: Trainer) -> None:
        if self._preemption.requested:
            self._save_in_time(trainer)
            raise SystemExit(self._preemption.exit_code)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Lightning ends the run for the signal by itself, if it came after the step was done."""
        if isinstance(exception, SIGTERMException) and self._preemption.requested:
            self._save_in_time(trainer)
            exception.code = self._preemption.exit_code

    def _save_in_time(self, trainer: Trainer) -> None:
        step = trainer.global_step
        if not self._is_saved:
            if self._preemption.can_still_save(step):
                self._save(trainer)
            else:
                _log.warning("the time to save has passed: the training ends after step %d unsaved", step)
        io = trainer.strategy.checkpoint_io
        if isinstance(io, XLAEagerCheckpointIO):
            io.settle()
        _log.warning("the training ends after step %d, as a signal asked", step)

    def _save(self, trainer: Trainer) -> None:
        self._schedule.saved(trainer.global_step)
        trainer.save_checkpoint(folder_of(trainer) / NAME)
        self._is_saved = True

    def close(self) -> None:
        """Handlers are put back."""
        self._lasting.close()


def folder_of(trainer: Trainer) -> Path:
    """Where the checkpoints of a run are."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            return Path(callback.dirpath)
    return Path(trainer.default_root_dir) / "checkpoints"


def check_options(strategy: str, config: CheckpointConfig, *, in_parts: bool) -> None:
    """Raises on options that cannot take effect.

    Raises:
        UnsupportedOptionError: with the alternative.
    """
    if config.keep_last is not None:
        raise UnsupportedOptionError(
            f"{strategy}: keep_last={config.keep_last}: Lightning decides which checkpoints stay; give "
            f"ModelCheckpoint(save_top_k={config.keep_last}) instead"
        )
    if config.asynchronous and in_parts:
        raise UnsupportedOptionError(
            f"{strategy}: asynchronous=True with ShardingConfig(checkpoints='sharded'): parts come to the host one at "
            "a time, so that the state never lies there as a whole, and a copy of all would be the opposite. Leave "
            "one of them out"
        )


def check_plugin_saves(strategy: str, config: CheckpointConfig, io: Any) -> None:
    """Raises if a plugin of the user's writes the checkpoints, and was to do so in the background.

    Raises:
        UnsupportedOptionError: with the alternative.
    """
    if config.asynchronous and not isinstance(io, XLAEagerCheckpointIO):
        raise UnsupportedOptionError(
            f"{strategy}: asynchronous=True, and {type(io).__name__} writes the checkpoints: leave the plugin away, or "
            "the option"
        )


def _tidy(trainer: Trainer) -> None:
    io = trainer.strategy.checkpoint_io
    if isinstance(io, XLAEagerCheckpointIO):
        io.tidy()
