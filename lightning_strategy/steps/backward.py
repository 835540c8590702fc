"""The backward pass of automatic optimization as part of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_strategy.steps.driver import StepDriver
from xla_adapters.tracing.loss_check import check_loss
from xla_adapters.utils.patching import replaced


@contextmanager
def backward_in_step(trainer: Trainer, steps: StepDriver) -> Iterator[None]:
    """Until the exit, a loop's backward discards the step if it raises, and raises the translated error.

    The strategy has no `backward` of its own: a spy in place of `Strategy.backward` would call it, and it the spy.

    Args:
        trainer: whose loop it is. With manual optimization the backward is a part of `training_step`.
        steps: of the run.

    Raises:
        LossError: in the backward, `training_step` returned a loss that is not one number.
    """
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    kind: Any = type(loop)
    stock = kind._make_backward_fn

    def make(self: Any, optimizer: Any) -> Callable[[torch.Tensor], None] | None:
        backward: Callable[[torch.Tensor], None] | None = stock(self, optimizer)
        if self is not loop or backward is None:
            return backward

        def computed(loss: torch.Tensor) -> None:
            module = trainer.lightning_module
            assert module is not None
            # A backward of the user's may take whatever it likes.
            if type(module).backward is LightningModule.backward:
                check_loss(loss, module.training_step)
            with steps.computing():
                backward(loss)

        return computed

    with replaced(kind, "_make_backward_fn", make):
        yield
