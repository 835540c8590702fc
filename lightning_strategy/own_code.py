"""Whether a replay may leave out the code of a LightningModule's steps, and what that code reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import grad_norm

from xla_adapters.replay.effects import Proof
from xla_adapters.replay.facts import FunctionFacts, ReadFact
from xla_adapters.replay.outside import FRESH, Batch, Held, Knowledge, Unproven, Value

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


class OwnCode:
    """The code of one kind of step of a module.

    Args:
        module: the module.
        name: of the step.
        proves: whether it must be shown to be without effects.

    Attributes:
        obstacle: why a replay might leave something out; None if it cannot, or need not be shown.
        generation: how often what the code reads has changed.
    """

    def __init__(self, module: LightningModule, name: str, *, proves: bool) -> None:
        self._module = module
        self._name = name
        self._proves = proves
        self.generation = 0
        self.obstacle: str | None = None
        self._facts: list[ReadFact] | list[FunctionFacts] = []
        self._examine()

    def follow(self) -> str | None:
        """Brings itself up to date; returns what has changed, if something has."""
        change = next((found for fact in self._facts if (found := fact.changed())), None)
        if change is not None:
            self.generation += 1
            self._examine()
        return change

    def _examine(self) -> None:
        step = getattr(self._module, self._name)
        if not self._proves:
            self._facts = [FunctionFacts(step)]
            return
        proof = Proof(_KNOWLEDGE)
        self.obstacle = None
        name = self._name
        try:
            handed_out = proof.examine(step, [Value((Batch(),)), Value((), "batch_idx")])
            if handed_out.varying:
                raise Unproven(f"it hands out {handed_out.varying}")
            for name in _HOOKS if self._name == "training_step" else ():
                hook = getattr(self._module, name)
                if getattr(hook, "__func__", None) is not getattr(LightningModule, name):
                    proof.examine(hook, [_argument(name, self._module)])
        except Unproven as error:
            self.obstacle = (
                f"a replay would leave out what {type(self._module).__name__}.{name} may do beside tensors: {error}; "
                "step_replay=True accepts that"
            )
        self._facts = proof.facts


def _argument(hook: str, module: LightningModule) -> Value:
    """The first argument of a hook: the loss, or the optimizer, which must stay as it is."""
    if "backward" in hook:
        return FRESH
    return Value(tuple(module.trainer.optimizers))
