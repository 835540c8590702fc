"""Whether a replay may leave out the code of a LightningModule's steps, and what that code reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import grad_norm

from xla_adapters.replay.effects import Proof
from xla_adapters.replay.outside import FRESH, Batch, Held, Knowledge, Unproven, Value
from xla_adapters.replay.own_code import OwnCode

# Hooks of a module that run in the middle of a training step.
_HOOKS = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_zero_grad",
    "backward",
)
# Their modules compute in forward, and do nothing else that a step would miss.
_PACKAGES = ("lightning.", "lightning_strategy.", "torch.", "torchmetrics.", "transformers.", "peft.", "xla_adapters.")


def _nothing(owner: Any) -> Iterable[Any]:
    return ()


def _optimizers(module: LightningModule) -> Iterable[Any]:
    found: Any = module.optimizers()
    return [Held(Value(tuple(found)))] if isinstance(found, list) else [found]


_CALLS = {
    **dict.fromkeys(
        (
            # What they note is part of the step's bound state.
            LightningModule.log,
            LightningModule.log_dict,
            LightningModule.manual_backward,
            LightningModule.toggle_optimizer,
            LightningModule.untoggle_optimizer,
            LightningModule.clip_gradients,
            LightningOptimizer.step,
            LightningOptimizer.toggle_model,
            torch.optim.Optimizer.zero_grad,
            torch.nn.Module.parameters,
            torch.nn.Module.named_parameters,
            torch.nn.Module.buffers,
            torch.nn.Module.zero_grad,
            grad_norm,
            *(getattr(LightningModule, name) for name in _HOOKS),
        ),
        _nothing,
    ),
    LightningModule.optimizers: _optimizers,
    torch.nn.Module.modules: torch.nn.Module.modules,
    torch.nn.Module.children: torch.nn.Module.children,
}
_KNOWLEDGE = Knowledge(
    packages=_PACKAGES,
    calls=_CALLS,
    methods=frozenset({"update", "compute"}),
    properties={
        "device": _nothing,
        "dtype": _nothing,
        "hparams": lambda module: [module.hparams],
    },
)


def own_code(module: LightningModule, name: str, *, proves: bool) -> OwnCode:
    """The code of one kind of step of a module.

    Args:
        module: the module.
        name: of the step.
        proves: whether it must be shown to be without effects.
    """

    def examine(proof: Proof) -> None:
        part = name
        try:
            handed_out = proof.examine(getattr(module, name), [Value((Batch(),)), Value((), "batch_idx")])
            if handed_out.varying:
                raise Unproven(f"it hands out {handed_out.varying}")
            for part in _HOOKS if name == "training_step" else ():
                hook = getattr(module, part)
                if getattr(hook, "__func__", None) is not getattr(LightningModule, part):
                    proof.examine(hook, [_argument(part, module)])
        except Unproven as error:
            raise Unproven(
                f"a replay would leave out what {type(module).__name__}.{part} may do beside tensors: {error}; "
                "step_replay=True accepts that"
            ) from None

    return OwnCode(_KNOWLEDGE, examine, trusted=None if proves else [getattr(module, name)])


def _argument(hook: str, module: LightningModule) -> Value:
    """The first argument of a hook: the loss, or the optimizer, which must stay as it is."""
    if "backward" in hook:
        return FRESH
    return Value(tuple(module.trainer.optimizers))
