"""`StallWatch`: raises if a step of a run, or the loading of the next batch, takes too long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import Any

from lightning.pytorch import Trainer

from xla_adapters.checkpoint import Watchdog
from xla_adapters.utils.patching import replaced


class StallWatch:
    """Keeps a `Watchdog` open from one training batch to the next, and around each batch of an evaluation.

    A training step and the loading of the batch after it are watched together: Lightning has no hook between them.

    Args:
        trainer: runs the loops.
        deadline: for a step with the loading of the next batch, and for a batch of an evaluation; None watches nothing.
        is_step_open: whether a step is being traced now.
    """

    def __init__(self, trainer: Trainer, deadline: timedelta | None, is_step_open: Callable[[], bool]) -> None:
        self._trainer = trainer
        self._deadline = deadline
        self._is_step_open = is_step_open
        self._open = ExitStack()

    def restart(self) -> None:
        """A training step begins: the deadline starts again."""
        self.stop()
        if self._trainer.training and not self._is_step_open():
            where = f"step {self._trainer.global_step + 1}, or the loading of the batch after it,"
            self._open.enter_context(self.watching(where))

    def stop(self) -> None:
        """What follows is no part of a training step (a save, an evaluation)."""
        self._open.close()

    def watching(self, what: str) -> AbstractContextManager[None]:
        """Raises if the body takes longer than the deadline.

        Args:
            what: the body in words, for the message.
        """
        return Watchdog(self._deadline).watch(what)

    @contextmanager
    def receiving_errors(self) -> Iterator[None]:
        """Until the exit, an exception that ends the fit loop passes through the open watchdog.

        The watchdog interrupts the main thread; it replaces that interrupt by its own error.
        """
        loop = self._trainer.fit_loop
        kind: Any = type(loop)
        stock = kind.run

        def run(running: Any) -> None:
            with ExitStack() as stack:
                if running is loop:
                    stack.push(self._open.__exit__)
                stock(running)

        with replaced(kind, "run", run):
            yield
