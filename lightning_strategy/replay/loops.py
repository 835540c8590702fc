"""How the Trainer's loops run a replayed step: the executable in place of the Python, and Lightning's own counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.optimization.automatic import Closure

from lightning_strategy.steps.driver import StepDriver
from xla_adapters.utils.patching import replaced


@contextmanager
def replaying_loops(trainer: Trainer, steps: StepDriver) -> Iterator[None]:
    """Until the exit, the loops run the executable in place of everything that a replayed training step does."""
    loop = trainer.fit_loop.epoch_loop
    # At the class, and not at the loop: a copy of the Trainer runs its loops as they are.
    with (
        _running(loop.automatic_optimization, _automatic(trainer, steps)),
        _running(loop.manual_optimization, _manual(trainer, steps)),
    ):
        yield


@contextmanager
def _running(loop: Any, run: Callable[..., Any]) -> Iterator[None]:
    kind: Any = type(loop)
    stock = kind.run

    def instead(self: Any, *args: Any) -> Any:
        return run(*args) if self is loop else stock(self, *args)

    with replaced(kind, "run", instead):
        yield


def _automatic(trainer: Trainer, steps: StepDriver) -> Callable[..., Any]:
    """Lightning's loop for automatic optimization; for a replayed step it counts what `loop.run` would count."""
    fit = trainer.fit_loop
    loop = fit.epoch_loop.automatic_optimization
    stock = loop.run

    def run(optimizer: Any, batch_idx: int, kwargs: Any) -> Any:
        if not steps.train.is_replaying:
            outputs = stock(optimizer, batch_idx, kwargs)
            # Does nothing where the update has ended the step: `keep_outputs` was called before.
            steps.train.keep("outputs", outputs)
            return outputs
        progress = loop.optim_progress.optimizer
        if not fit._should_accumulate():
            progress.step.increment_ready()
        outputs = steps.replayed()
        if batch_idx % trainer.accumulate_grad_batches == 0 and not loop._skip_backward:
            progress.zero_grad.increment_ready()
            progress.zero_grad.increment_started()
            progress.zero_grad.increment_completed()
        if not fit._should_accumulate():
            progress.step.increment_completed()
        return outputs

    return run


def _manual(trainer: Trainer, steps: StepDriver) -> Callable[..., Any]:
    """Lightning's loop for manual optimization; for a replayed step it counts the recorded number of updates."""
    loop = trainer.fit_loop.epoch_loop.manual_optimization
    stock = loop.run

    def run(kwargs: Any) -> Any:
        progress = loop.optim_step_progress
        if not steps.train.is_replaying:
            before = progress.total.completed
            outputs = stock(kwargs)
            steps.train.keep("outputs", outputs)
            steps.train.keep("updates", progress.total.completed - before)
            return outputs
        updates = steps.train.promise("updates")
        outputs = steps.replayed()
        for _ in range(updates):
            progress.increment_ready()
            progress.increment_completed()
        return outputs

    return run


def keep_outputs(steps: StepDriver, closure: Any) -> None:
    """Notes what the loop is going to return for this step: the update is about to end the step.

    Args:
        steps: of the run.
        closure: what the optimizer was given. A closure that is not the loop's cannot be kept as an output, so that
            the step is not replayed.
    """
    result = closure._result if isinstance(closure, Closure) else None
    if result is None:
        steps.train.keep("outputs", closure)
        return
    steps.train.keep("outputs", {} if result.loss is None else result.asdict())
    # The closure refers to it until the loop goes on.
    steps.train.keep("loss before it is detached", result.closure_loss)
