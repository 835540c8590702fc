"""Schedule hooks: when `CheckpointConfig` has a checkpoint saved, what a signal does, and what ends a hang."""

from __future__ import annotations

import logging
import warnings
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerControl
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from hf_trainer.trainer_hooks import TrainerHooks
from xla_adapters.checkpoint import CheckpointConfig, CheckpointWarning, Preemption, SaveSchedule, Watchdog
from xla_adapters.errors import ConfigError, UnsupportedOptionError

_log = logging.getLogger(__name__)


class ScheduleHooks(TrainerHooks):
    """Saves when it is due, and before the process is ended."""

    safe_checkpoints: bool
    checkpoint_config: CheckpointConfig
    _preemption: Preemption
    _schedule: SaveSchedule
    # Steps done and entries logged at the last save: an evaluation after it is not in it.
    _saved_at: tuple[int, int] = (-1, -1)
    _watching: ExitStack

    if TYPE_CHECKING:

        def _settle(self) -> None: ...

    # ---- a training ------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`; ends the process with `preemption_exit_code` after a save before the end."""
        config = self.checkpoint_config
        self._preemption = Preemption(config, also=self._backend.preemption_sync_point())
        self._watching = ExitStack()
        self._schedule = SaveSchedule(config, preemption=self._preemption)
        with ExitStack() as stack:
            if config.save_on == "preemption":
                stack.enter_context(self._preemption)
            return super().train(*args, **kwargs)

    def step_is_done(self, control: TrainerControl) -> None:
        """An optimizer step and its callbacks are done (called by the last callback)."""
        if self._schedule.due(self.state.global_step) is not None:
            control.should_save = True

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step = self.state.global_step
        super()._save_checkpoint(model, trial)
        self._schedule.saved(step)
        self._saved_at = (step, len(self.state.log_history))

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, model: Any, trial: Any, *args: Any, **kwargs: Any
    ) -> None:
        if self._preemption.can_still_save(self.state.global_step) and self.control.should_evaluate:
            # Before the evaluation, which may take longer than there is time.
            self._save_checkpoint(model, trial)
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *args, **kwargs)
        if self._preemption.requested:
            self._end(model, trial)

    def _end(self, model: Any, trial: Any) -> None:
        step = self.state.global_step
        if self._saved_at != (step, len(self.state.log_history)):
            if self._preemption.can_still_save(step):
                self._save_checkpoint(model, trial)
            else:
                _log.warning("the time to save has passed: the training ends after step %d unsaved", step)
        self._settle()
        _log.warning("the training ends after step %d, as a signal asked", step)
        raise SystemExit(self._preemption.exit_code)

    # ---- what takes too long ---------------------------------------------------------------------

    def _watch(self, what: str) -> AbstractContextManager[None]:
        return Watchdog(self.checkpoint_config.stall_deadline).watch(what)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.get_batch_samples`; the watch over the step begins."""
        self._watching.close()
        self._watching.enter_context(self._watch(f"step {self.state.global_step + 1}"))
        return super().get_batch_samples(*args, **kwargs)

    def close_update(self) -> None:
        """The optimizer has stepped: the watch over the step ends with it."""
        super().close_update()  # type: ignore[misc]
        self._watching.close()

    def prediction_step(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor | None, Any, Any]:
        """As `Trainer.prediction_step`."""
        with self._watch("a step of the evaluation"):
            return super().prediction_step(*args, **kwargs)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            # What ends the loop goes to the watch that is open then, which knows whether it was its own doing.
            stack.push(lambda *raised: self._watching.__exit__(*raised))
            return super()._inner_training_loop(*args, **kwargs)


def check_checkpoint_options(
    config: CheckpointConfig, *, safe: bool, processes: int, in_parts: bool, limit: Any
) -> None:
    """Raises on options that cannot take effect, and warns of the default that does not.

    Args:
        config: how checkpoints are saved.
        safe: `safe_checkpoints`.
        processes: that train together.
        in_parts: whether sharded state is saved as each device holds it.
        limit: `save_total_limit`.

    Raises:
        ConfigError: two of them contradict each other.
        UnsupportedOptionError: one needs what this run does not have.
    """
    needs_store = [
        f"{name}={getattr(config, name)!r}"
        for name in ("asynchronous", "keep_last")
        if getattr(config, name) not in (None, False)
    ]
    if needs_store and not safe:
        raise ConfigError(f"{' and '.join(needs_store)}: only with safe_checkpoints=True")
    if config.keep_last is not None and limit is not None:
        raise ConfigError(
            f"keep_last={config.keep_last} and save_total_limit={limit} say the same in two ways: give one of them"
        )
    if config.asynchronous and in_parts:
        raise UnsupportedOptionError(
            "asynchronous=True with ShardingConfig(checkpoints='sharded'): parts come to the host one at a time, so "
            "that the state never lies there as a whole, and a copy of all would be the opposite. Leave one of them out"
        )
    if processes > 1 and config != CheckpointConfig():
        raise UnsupportedOptionError(
            f"checkpoint={config!r}: {processes} processes train together, each of which would decide and write for "
            "itself; leave the option out"
        )
    if processes > 1 and safe:
        warnings.warn(
            f"safe_checkpoints has no effect: {processes} processes train together, and transformers has each of them "
            "write files of its own. Checkpoints are written, and loaded unchecked, as transformers does it",
            CheckpointWarning,
            stacklevel=2,
        )


def hold_jit_checkpoint(callbacks: list[Any]) -> None:
    """Lets transformers' `enable_jit_checkpoint` wait for the end of the step: there is nothing to save inside it."""
    for callback in callbacks:
        if isinstance(callback, JITCheckpointCallback):
            callback.on_pre_optimizer_step = _wait  # type: ignore[method-assign]


def _wait(*args: Any, **kwargs: Any) -> None: ...
