"""`StallWatch`: ends a step that takes longer than `stall_deadline`."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from types import TracebackType

import transformers

from xla_adapters.checkpoint import CheckpointConfig, Watchdog


class StallWatch:
    """Watches training and evaluation steps with the core's `Watchdog`.

    Args:
        trainer: the trainer.
        config: has the deadline.
    """

    def __init__(self, trainer: transformers.Trainer, config: CheckpointConfig) -> None:
        self._trainer = trainer
        self._watchdog = Watchdog(config.stall_deadline)
        self._step = ExitStack()

    def begin_step(self) -> None:
        """The loop fetches the batches of an optimizer step: the watch begins."""
        self._step.close()
        self._step.enter_context(self._watchdog.watch(f"step {self._trainer.state.global_step + 1}"))

    def end_step(self) -> None:
        """The optimizer has stepped: the watch ends."""
        self._step.close()

    def end_loop(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """The training loop ends, perhaps by an error. The open watch sees it and knows whether it caused it."""
        return self._step.__exit__(kind, error, traceback)

    def evaluation_step(self) -> AbstractContextManager[None]:
        """Around a step of the evaluation."""
        return self._watchdog.watch("a step of the evaluation")
