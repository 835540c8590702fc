"""Whether a replay may leave out the code of a LightningModule's steps, and what that code reads."""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import grad_norm
from torchmetrics import Metric

from xla_adapters.replay.effects import Proof
from xla_adapters.replay.outside import FRESH, OF_MODULES, Batch, Held, Knowledge, Unproven, Value, nothing
from xla_adapters.replay.own_code import OwnCode

# Methods of a module that Lightning calls in the middle of a step, with what it hands them by position.
_LOGGING: dict[str, tuple[str, ...]] = {"log": ("name", "logged")}
_HOOKS: dict[str, tuple[str, ...]] = {
    "on_before_zero_grad": ("optimizer",),
    "on_before_backward": ("loss",),
    "on_after_backward": (),
    "on_before_optimizer_step": ("optimizer",),
    "configure_gradient_clipping": ("optimizer", "clip_val", "algorithm"),
    "clip_gradients": ("optimizer", "clip_val", "algorithm"),
    "optimizer_zero_grad": ("epoch", "batch_idx", "optimizer"),
    "backward": ("loss",),
    "toggle_optimizer": ("lightning optimizer",),
    "untoggle_optimizer": ("lightning optimizer",),
    **_LOGGING,
}
# Their modules compute in forward, and do nothing else that a step would miss.
_PACKAGES = ("lightning.", "lightning_strategy.", "torch.", "torchmetrics.", "transformers.", "peft.", "xla_adapters.")


def _optimizers(module: LightningModule) -> Iterable[Any]:
    found: Any = module.optimizers()
    return [Held(Value(tuple(found)))] if isinstance(found, list) else [found]


_CALLS = {
    **OF_MODULES,
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
            grad_norm,
            *(getattr(LightningModule, name) for name in _HOOKS),
        ),
        nothing,
    ),
    LightningModule.optimizers: _optimizers,
}
_KNOWLEDGE = Knowledge(
    packages=_PACKAGES,
    calls=_CALLS,
    methods=frozenset({"update", "compute"}),
    properties={
        "device": nothing,
        "dtype": nothing,
        "hparams": lambda module: [module.hparams],
    },
)


class StepCode:
    """The code of one kind of step of a module, whichever functions it consists of now.

    Args:
        module: the module.
        name: of the step.
        proves: whether the code must be shown to be without effects.
    """

    def __init__(self, module: LightningModule, name: str, *, proves: bool) -> None:
        self._module = module
        self._name = name
        self._proves = proves
        self._names = (name, "forward", *_called_within(name))
        self._before = 0
        self._code = _own_code(module, name, proves=proves)
        self._hold()

    @property
    def obstacle(self) -> str | None:
        """What a replay would leave out, and where it stands; None if nothing."""
        return self._code.obstacle

    @property
    def generation(self) -> int:
        """How often the code, or what it reads, has changed."""
        return self._before + self._code.generation

    @property
    def change(self) -> str | None:
        """What had changed of what the code reads when it was followed last, or None."""
        return self._code.change

    def follow(self) -> None:
        """Looks again if the code, or what it reads, has changed."""
        generation = self.generation
        if all(map(_is_same, self._functions, self._present())):
            self._code.follow()
        else:
            self._before = generation + 1
            self._code = _own_code(self._module, self._name, proves=self._proves)
        if self.generation != generation:
            self._hold()

    def _hold(self) -> None:
        """Holds the functions, so that no other one can be taken for one of them."""
        self._parts = list(self._module.modules())
        self._functions = list(self._present())

    def _present(self) -> Iterable[Any]:
        yield from (getattr(self._module, name) for name in self._names)
        yield from (vars(part).get("forward") for part in self._parts)


def _is_same(one: Any, other: Any) -> bool:
    # Each look at a method makes another object of it.
    same_owner = getattr(one, "__self__", None) is getattr(other, "__self__", None)
    return same_owner and getattr(one, "__func__", one) is getattr(other, "__func__", other)


def _called_within(name: str) -> dict[str, tuple[str, ...]]:
    return _HOOKS if name == "training_step" else _LOGGING


def _own_code(module: LightningModule, name: str, *, proves: bool) -> OwnCode:
    def examine(proof: Proof) -> None:
        part = name
        try:
            handed_out = _examined(proof, getattr(module, name), [Value((Batch(),)), Value((), "batch_idx")])
            if handed_out.varying:
                raise Unproven(f"it hands out {handed_out.varying}")
            for forward in _replaced_in_known(module):
                _examined(proof, forward, [])
            for part, given in _called_within(name).items():
                hook = getattr(module, part)
                if getattr(hook, "__func__", None) is not getattr(LightningModule, part):
                    _examined(proof, hook, [_argument(kind, module) for kind in given])
        except Unproven as error:
            raise Unproven(
                f"a replay would leave out what {type(module).__name__}.{part} may do beside tensors: {error}; "
                "step_replay=True accepts that"
            ) from None

    return OwnCode(_KNOWLEDGE, examine, trusted=None if proves else [getattr(module, name)])


def _replaced_in_known(module: LightningModule) -> Iterable[Any]:
    """What took the place of `forward` in single modules of known packages, which nobody would look into."""
    for part in module.modules():
        if "forward" in vars(part) and type(part).__module__.startswith(_PACKAGES):
            yield vars(part)["forward"]


def _examined(proof: Proof, function: Any, arguments: list[Value]) -> Value:
    if not isinstance(getattr(function, "__func__", function), FunctionType):
        raise Unproven(f"it is a {type(function).__name__}, and no function written in Python")
    return proof.examine(function, arguments)


def _argument(kind: str, module: LightningModule) -> Value:
    """What is known of an argument that Lightning hands to a method."""
    trainer: Any = module.trainer
    if kind == "optimizer":
        return Value(tuple(trainer.optimizers))
    if kind == "lightning optimizer":
        return Value(tuple(trainer.strategy._lightning_optimizers))
    if kind == "logged":
        return Value(tuple(part for part in module.modules() if isinstance(part, Metric)))
    # The others are the step's own, or part of what every replay depends on.
    return Value((), kind) if kind in ("epoch", "batch_idx") else FRESH
