"""`ScheduledSaves`: the callback that saves when `CheckpointConfig` says so, or when a signal ends the process."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_strategy.checkpoints.io import XLAEagerCheckpointIO
from xla_adapters import get_runtime
from xla_adapters.checkpoint import CheckpointConfig, Preemption, SaveSchedule
from xla_adapters.errors import UnsupportedOptionError

# `ckpt_path="last"` looks for names that begin with "last".
NAME = "last-xla_adapters.ckpt"
_log = logging.getLogger(__name__)


class ScheduledSaves(Callback):
    """Saves between steps, under one name, in the folder of the first `ModelCheckpoint`.

    It runs after all other callbacks, so that what it saves is what they see.

    Args:
        config: when to save.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self._preemption = Preemption(config, also=get_runtime().device.preemption_sync_point())
        self._schedule = SaveSchedule(config, preemption=self._preemption)
        self._lasting = ExitStack()
        # No step and no evaluation was done since the last save.
        self._is_saved = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins to note signals, beside Lightning's own handler."""
        if self._config.save_on == "preemption":
            self._lasting.enter_context(self._preemption)

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Saves if it is due; after a signal saves and ends the process."""
        self._is_saved = False
        _tidy(trainer)
        if trainer.fit_loop._should_accumulate():
            return
        if self._schedule.due(trainer.global_step) is not None:
            self._save(trainer)
        self._end_after_signal(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """After a signal during an evaluation saves and ends the process."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._is_saved = False
            self._end_after_signal(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As `on_validation_end`."""
        self._end_after_signal(trainer)

    def _end_after_signal(self, trainer: Trainer) -> None:
        if self._preemption.requested:
            self._save_before_end(trainer)
            raise SystemExit(self._preemption.exit_code)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Saves where Lightning's own handler ends the run: the signal came between two steps."""
        if isinstance(exception, SIGTERMException) and self._preemption.requested:
            self._save_before_end(trainer)
            exception.code = self._preemption.exit_code

    def _save_before_end(self, trainer: Trainer) -> None:
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
        """Restores the signal handlers."""
        self._lasting.close()


def folder_of(trainer: Trainer) -> Path:
    """The folder of a run's checkpoints."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            return Path(callback.dirpath)
    return Path(trainer.default_root_dir) / "checkpoints"


def check_options(strategy: str, config: CheckpointConfig, *, sharded: bool) -> None:
    """Raises on options that cannot take effect.

    Args:
        strategy: its name, for messages.
        config: the options.
        sharded: whether checkpoints are sharded.

    Raises:
        UnsupportedOptionError: with the alternative.
    """
    if config.keep_last is not None:
        raise UnsupportedOptionError(
            f"{strategy}: keep_last={config.keep_last}: Lightning decides which checkpoints stay; give "
            f"ModelCheckpoint(save_top_k={config.keep_last}) instead"
        )
    if config.asynchronous and sharded:
        raise UnsupportedOptionError(
            f"{strategy}: asynchronous=True with ShardingConfig(checkpoints='sharded'): parts come to the host one at "
            "a time, so that the state never lies there as a whole, and a copy of all would be the opposite. Leave "
            "one of them out"
        )


def check_plugin_saves(strategy: str, config: CheckpointConfig, io: Any) -> None:
    """Raises if checkpoints are to be saved in the background, and a plugin of the user's writes them.

    Args:
        strategy: its name, for messages.
        config: the options.
        io: writes the checkpoints.

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
