"""`LossSum`: the loop's sum of losses between two logs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from hf_trainer.torch_tpu import losses_not_filtered
from xla_adapters import get_runtime
from xla_adapters.insight.times import STEP, WallClock
from xla_adapters.runtime.transfers import uploading


class LossSum:
    """`Trainer._tr_loss`, which each training step updates on the device.

    Args:
        trainer: the trainer.
        base: the methods that the mixin overrides.
        clock: told that the steps' results are waited for.
    """

    def __init__(self, trainer: transformers.Trainer, base: Any, clock: WallClock) -> None:
        self._trainer = trainer
        self._base = base
        self._clock = clock
        self._has_explained = False
        self._filters = False

    @contextmanager
    def not_filtered(self) -> Iterator[None]:
        """Around the training loop, in which no loss is left out of the sum."""
        args = self._trainer.args
        self._filters = args.logging_nan_inf_filter
        with losses_not_filtered(args):
            yield

    def make_donatable(self) -> None:
        """Replaces the scalar that the loop begins with."""
        if self._trainer._tr_loss.ndim == 0:
            self._trainer._tr_loss = self._zero()

    def log(self, tr_loss: torch.Tensor, grad_norm: torch.Tensor | float | None, *args: Any, **kwargs: Any) -> None:
        """As `Trainer._maybe_log_save_evaluate`. Loss and gradient norm come to the host in one transfer."""
        trainer = self._trainer
        logs = trainer.control.should_log and trainer.state.global_step > trainer._globalstep_last_logged
        if not logs or trainer.args.world_size > 1:
            self._base._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)
            return
        with self._clock.during(STEP):
            if isinstance(grad_norm, torch.Tensor):
                tr_loss, grad_norm = get_runtime().transfers.to_host([tr_loss, grad_norm])
            else:
                (tr_loss,) = get_runtime().transfers.to_host([tr_loss])
        if self._filters and not torch.isfinite(tr_loss).all():
            self._explain_filter(tr_loss)
        self._base._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)
        # The base class sets the loss that it was given to zero, and that was the copy on the host.
        trainer._tr_loss = self._zero()

    def _explain_filter(self, total: torch.Tensor) -> None:
        if self._has_explained:
            return
        self._has_explained = True
        warnings.warn(
            f"the sum of losses since the last log is {total.item()}: on XLA devices logging_nan_inf_filter=True "
            "leaves out no loss, because it would read each one on the host; logging_steps=1 shows the step",
            stacklevel=2,
        )

    def _zero(self) -> torch.Tensor:
        # Of shape (1,), not (): torch_xla shares uploaded scalars between tensors and so never donates
        # their buffer, which would make the step after each log another graph.
        with uploading():
            return torch.zeros(1).to(self._trainer.args.device)
