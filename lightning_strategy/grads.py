"""Whether gradients may be dropped inside the step, so that they are not outputs of its graph."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

# Hooks between the update and the next zero_grad, where gradients can still be seen.
_HOOKS = ("on_train_batch_end", "on_before_zero_grad")
_OWN_PACKAGES = ("lightning.", "lightning_strategy.")


def nobody_sees_grads(trainer: Trainer, module: LightningModule) -> bool:
    """Whether no code of the user's runs between the update and the next `zero_grad`."""
    if any(is_overridden(hook, module) for hook in _HOOKS):
        return False
    return not any(_defines(callback, hook) for callback in trainer.callbacks for hook in _HOOKS)  # type: ignore[attr-defined]


def _defines(callback: Callback, hook: str) -> bool:
    method = getattr(type(callback), hook)
    return method is not getattr(Callback, hook) and not method.__module__.startswith(_OWN_PACKAGES)
