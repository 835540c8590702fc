"""The user's own code in the steps of a LightningModule: may a replay leave it out, and what does it read?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import FunctionType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import grad_norm
from torchmetrics import Metric

from xla_adapters.replay.safety import (
    DATA,
    MODULE_CALLS,
    UNKNOWN,
    Analysis,
    Batch,
    FrameworkModel,
    Held,
    Unsafe,
    Value,
    Varying,
    nothing,
)
from xla_adapters.replay.tracked_code import TrackedCode

# Methods of a module that Lightning calls inside a step, with the kinds of their positional arguments (`_argument`).
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


def _optimizers(module: LightningModule) -> Iterable[Any]:
    found: Any = module.optimizers()
    return [Held(Value(tuple(found)))] if isinstance(found, list) else [found]


_CALLS = {
    **MODULE_CALLS,
    **dict.fromkeys(
        (
            # What they record is in attributes that `ReplayRules` names as bound.
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
_FRAMEWORK = FrameworkModel(
    calls=_CALLS,
    methods=frozenset({"update", "compute"}),
    properties={
        "device": nothing,
        "dtype": nothing,
        "hparams": lambda module: [module.hparams],
    },
)


class StepCode:
    """The user's code in one kind of step of a module, analysed again when its functions are replaced.

    Args:
        module: the module.
        name: of its method, such as `"training_step"`.
        proves: whether the code must be shown to have no side effects.
    """

    def __init__(self, module: LightningModule, name: str, *, proves: bool) -> None:
        self._module = module
        self._name = name
        self._proves = proves
        self._names = (name, "forward", *_called_within(name))
        self._before = 0
        self._code = _tracked_code(module, name, proves=proves)
        self._remember_functions()

    @property
    def obstacle(self) -> str | None:
        """The side effect that a replay would leave out, with its line; None if there is none."""
        return self._code.obstacle

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """Tensors that the code reads and that belong to no module (globals, closures)."""
        return self._code.tensors

    @property
    def modules(self) -> Sequence[torch.nn.Module]:
        """Modules that the code uses."""
        return self._code.modules

    def look_again(self) -> None:
        """Analyses the code again, after a change that its guards cannot see."""
        self._code.look_again()

    @property
    def generation(self) -> int:
        """How often the code, or what it reads, has changed."""
        return self._before + self._code.generation

    @property
    def change(self) -> str | None:
        """What `follow` found changed at its last call, None if nothing."""
        return self._code.change

    def follow(self) -> None:
        """Analyses the code again if it, or what it reads, has changed."""
        generation = self.generation
        if all(map(_is_same, self._functions, self._present())):
            self._code.follow()
        else:
            self._before = generation + 1
            self._code = _tracked_code(self._module, self._name, proves=self._proves)
        if self.generation != generation:
            self._remember_functions()

    def _remember_functions(self) -> None:
        """Keeps references to the functions, so that no new one gets the `id` of one of them."""
        self._parts = list(self._module.modules())
        self._functions = list(self._present())

    def _present(self) -> Iterable[Any]:
        yield from (getattr(self._module, name) for name in self._names)
        yield from (vars(part).get("forward") for part in self._parts)


def _is_same(one: Any, other: Any) -> bool:
    # `getattr` returns a new bound method each time.
    same_owner = getattr(one, "__self__", None) is getattr(other, "__self__", None)
    return same_owner and getattr(one, "__func__", one) is getattr(other, "__func__", other)


def _called_within(name: str) -> dict[str, tuple[str, ...]]:
    return _HOOKS if name == "training_step" else _LOGGING


def _tracked_code(module: LightningModule, name: str, *, proves: bool) -> TrackedCode:
    def examine(analysis: Analysis) -> None:
        part = name
        try:
            given = [Value((Batch(),)), Value((Varying("batch_idx"),)), Value((Varying("dataloader_idx"),))]
            analysis.check_returned(_examined(analysis, getattr(module, name), given))
            for part, kinds in _called_within(name).items():
                hook = getattr(module, part)
                if getattr(hook, "__func__", None) is not getattr(LightningModule, part):
                    _examined(analysis, hook, [_argument(kind, module) for kind in kinds])
        except Unsafe as error:
            raise Unsafe(f"{type(module).__name__}.{part} is not known to be safe to leave out: {error}") from None

    return TrackedCode(_FRAMEWORK, examine, promised=None if proves else [getattr(module, name)])


def _examined(analysis: Analysis, function: Any, arguments: list[Value]) -> Value:
    if not isinstance(getattr(function, "__func__", function), FunctionType):
        raise Unsafe(f"it is a {type(function).__name__}, and no function written in Python")
    return analysis.examine(function, arguments, {UNKNOWN: DATA})


def _argument(kind: str, module: LightningModule) -> Value:
    """What is known of an argument that Lightning gives to a method, by its kind."""
    trainer: Any = module.trainer
    if kind == "optimizer":
        return Value(tuple(trainer.optimizers))
    if kind == "lightning optimizer":
        return Value(tuple(trainer.strategy._lightning_optimizers))
    if kind == "logged":
        return Value(tuple(part for part in module.modules() if isinstance(part, Metric)))
    # The others are computed in the step, or are equal in all calls of one recorded step.
    return Value((Varying(kind),)) if kind in ("epoch", "batch_idx") else DATA
