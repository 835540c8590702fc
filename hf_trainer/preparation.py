"""Prepares model and optimizer for training, after transformers has done so."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from hf_trainer.optimizers import innermost
from hf_trainer.placement import own_scalars
from hf_trainer.refusals import check_optimizer
from xla_adapters import XLAConfig, get_runtime
from xla_adapters.errors import UnsupportedOptionError


def prepare_for_xla(trainer: transformers.Trainer, config: XLAConfig) -> None:
    """Makes model and optimizer of a trainer ready for compiled steps.

    Args:
        trainer: the trainer, after `_prepare_for_training`.
        config: how steps are run.

    Raises:
        UnsupportedOptionError: the optimizer, or an option of activation checkpointing, cannot work on XLA.
    """
    check_optimizer(innermost(trainer.optimizer), None)
    _check_activation_checkpointing(trainer)
    if config.eager_by_default and get_runtime().tracing.pending_count():
        # What the program left pending must not become part of the first step.
        get_runtime().tracing.flush()
    if trainer.model is not None:
        own_scalars(trainer.model)


def _check_activation_checkpointing(trainer: transformers.Trainer) -> None:
    given: Any = trainer.args.activation_checkpointing_kwargs
    if trainer.args.activation_checkpointing and dict(given or {}).get("offload"):
        raise UnsupportedOptionError(
            "activation_checkpointing_kwargs={'offload': True}: activations cannot move to the host inside one "
            "XLA graph; leave offload off (recomputation alone already frees them)"
        )


def bfloat16_autocast(trainer: transformers.Trainer) -> torch.autocast:
    """The autocast that `bf16=True` means for the forward pass."""
    return torch.autocast(trainer.args.device.type, dtype=torch.bfloat16)
