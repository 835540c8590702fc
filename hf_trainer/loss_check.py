"""Checks the loss of a training step where the trainer's `compute_loss` returns it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import transformers

from hf_trainer.placement import model_of
from hf_trainer.user_code import overridden
from xla_adapters.tracing.loss_check import check_loss
from xla_adapters.utils.patching import replaced


@contextmanager
def checked_loss(trainer: transformers.Trainer) -> Iterator[None]:
    """Inside the context `trainer.compute_loss` raises if its loss is not a tensor with one element.

    transformers divides the loss and differentiates it, whose errors name neither the function nor what it returned.

    Args:
        trainer: with all overrides of the user's class.
    """
    method, source = trainer.compute_loss, _source(trainer)

    @functools.wraps(method)
    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        loss = method(*args, **kwargs)
        if not (args[2] if len(args) > 2 else kwargs.get("return_outputs")):
            check_loss(loss, source)
        return loss

    with replaced(trainer, "compute_loss", compute_loss):
        yield


def _source(trainer: transformers.Trainer) -> Callable[..., Any]:
    """The function that the loss is from."""
    if overridden(trainer, ("compute_loss",)) is not None:
        return trainer.compute_loss
    return trainer.compute_loss_func or model_of(trainer).forward
