"""Gradients between two steps: whether anybody sees them, and what a checkpoint keeps of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from xla_adapters import get_backend

# In a checkpoint.
GRADIENTS = "gradients"
# Hooks between the update and the next zero_grad, where gradients can still be seen.
_HOOKS = ("on_train_batch_end", "on_before_zero_grad")
_OWN_PACKAGES = ("lightning.", "lightning_strategy.")


def nobody_sees_grads(trainer: Trainer, module: LightningModule) -> bool:
    """Whether no code of the user's runs between the update and the next `zero_grad`.

    If so they may be dropped inside the step, so that they are not outputs of its graph.
    """
    if any(is_overridden(hook, module) for hook in _HOOKS):
        return False
    return not any(_defines(callback, hook) for callback in trainer.callbacks for hook in _HOOKS)  # type: ignore[attr-defined]


def accumulated(trainer: Trainer, module: LightningModule) -> dict[str, torch.Tensor]:
    """The gradients that the next batch adds to, by the names of their parameters."""
    if module.automatic_optimization and not trainer.fit_loop._should_accumulate():
        return {}
    # Not themselves: those of a replay may lie elsewhere until they are used.
    return {name: value.grad.detach() for name, value in module.named_parameters() if value.grad is not None}


def put_back(module: LightningModule, gradients: Mapping[str, torch.Tensor]) -> None:
    """Goes on from gradients that were saved, on the host; they lie as their parameters do."""
    backend = get_backend()
    for name, parameter in module.named_parameters():
        if name in gradients:
            tiles = backend.tiles_of(parameter) if backend.is_spmd() else None
            value = gradients[name]
            parameter.grad = backend.to_device(value) if tiles is None else backend.upload_sharded(value, tiles)


def _defines(callback: Callback, hook: str) -> bool:
    method = getattr(type(callback), hook)
    return method is not getattr(Callback, hook) and not method.__module__.startswith(_OWN_PACKAGES)
