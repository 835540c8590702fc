"""Gradients between two steps: may they be freed inside the step, and which of them does a checkpoint hold?"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden

from xla_adapters import get_runtime

# Their key in a checkpoint's exact state.
GRADIENTS = "gradients"
# Hooks between the update and the next `zero_grad`, in which user code can read gradients.
_HOOKS = ("on_train_batch_end", "on_before_zero_grad")
_OWN_PACKAGES = ("lightning.", "lightning_strategy.")


def nobody_sees_grads(trainer: Trainer, module: LightningModule) -> bool:
    """Whether no code but the step's own looks at gradients between the update and the next `zero_grad`.

    If so, the step may set the gradients to None: they are no outputs of its graph then.
    """
    if any(is_overridden(hook, module) for hook in _HOOKS):
        return False
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    # Its last epoch, for batch norms, has no backward, but one more update, with the gradients of the last batch.
    if any(isinstance(callback, StochasticWeightAveraging) for callback in callbacks):
        return False
    return not any(_defines(callback, hook) for callback in callbacks for hook in _HOOKS)


def accumulated(trainer: Trainer, module: LightningModule) -> dict[str, torch.Tensor]:
    """The gradients that the next batch adds to, by the names of their parameters; empty after an update."""
    if module.automatic_optimization and not trainer.fit_loop._should_accumulate():
        return {}
    return {name: value.grad.detach() for name, value in module.named_parameters() if value.grad is not None}


def load_gradients(module: LightningModule, gradients: Mapping[str, torch.Tensor]) -> None:
    """Sets the gradients of a module, each on the device and sharded as its parameter.

    Args:
        module: on the device.
        gradients: by the names of their parameters, on the host.
    """
    runtime = get_runtime()
    for name, parameter in module.named_parameters():
        if name in gradients:
            tiles = runtime.spmd.tiles_of(parameter) if runtime.device.is_spmd() else None
            value = gradients[name]
            parameter.grad = (
                runtime.transfers.to_device(value) if tiles is None else runtime.spmd.upload_sharded(value, tiles)
            )


def _defines(callback: Callback, hook: str) -> bool:
    # Of the object, not of its class: a callback may be a mock, or have a hook set on it.
    method = getattr(callback, hook)
    function = getattr(method, "__func__", method)
    return function is not getattr(Callback, hook) and not function.__module__.startswith(_OWN_PACKAGES)
