"""Replayed steps in the Trainer's loops: which steps may be replayed, their `CallSpec`, and the user code in them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from types import FunctionType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities import grad_norm
from torchmetrics import Metric

from xla_adapters import get_runtime
from xla_adapters.loop.replay import StepCode, batch_of, key_of, optimizer_reason
from xla_adapters.replay.attribute_changes import Owner
from xla_adapters.replay.call_spec import CallSpec, batch_reason
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
            # What they record is in attributes of owners that `ReplayRules` names.
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


def step_code(module: LightningModule, name: str, *, proves: bool) -> StepCode:
    """The user's code in one kind of step of a module.

    Args:
        module: the module.
        name: of its method, such as `"training_step"`.
        proves: whether the code must be shown to have no side effects.
    """
    names = (name, "forward", *_called_within(name))

    def functions(parts: list[torch.nn.Module]) -> dict[str, Any]:
        return {
            **{each: getattr(module, each) for each in names},
            "parts": [vars(part).get("forward") for part in parts],
        }

    def examine(functions: Mapping[str, Any], analysis: Analysis) -> None:
        part = name
        try:
            given = [Value((Batch(),)), Value((Varying("batch_idx"),)), Value((Varying("dataloader_idx"),))]
            analysis.check_returned(_examined(analysis, functions[name], given))
            for part, kinds in _called_within(name).items():
                hook = functions[part]
                if getattr(hook, "__func__", None) is not getattr(LightningModule, part):
                    _examined(analysis, hook, [_argument(kind, module) for kind in kinds])
        except Unsafe as error:
            raise Unsafe(f"{type(module).__name__}.{part} is not known to be safe to leave out: {error}") from None

    return StepCode(
        _FRAMEWORK,
        functions,
        examine,
        promised=lambda: None if proves else [getattr(module, name)],
        parts=lambda: list(module.modules()),
    )


def _called_within(name: str) -> dict[str, tuple[str, ...]]:
    return _HOOKS if name == "training_step" else _LOGGING


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


_OWN_PACKAGES = ("lightning.", "lightning_strategy.")
# Hooks of callbacks that Lightning calls inside a training step.
_WITHIN = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
# Attributes of a `_ResultMetric` that `self.log` reassigns.
_LOGGED = ("value", "cumulated_batch_size", "_forward_cache", "_computed", "_update_count", "has_reset")
# Attributes that every update of a metric sets to the same values.
_SET = ("_computed", "has_reset")
# The name of the hook that Lightning is in.
_UNRELATED = frozenset({"_current_fx_name"})
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))


class ReplayRules:
    """Describes each step of a run for the core's replay (`CallSpec`), or says why it must not be replayed.

    Args:
        trainer: runs the loops.
        module: is trained.
        deferred: how many updates of metrics are deferred to the end of the step.
        proves: whether the module's code must be shown to have no side effects.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, deferred: Callable[[], int], *, proves: bool) -> None:
        self._trainer: Any = trainer
        self._module = module
        self._deferred = deferred
        self._proves = proves
        self._code: dict[str, StepCode] = {}
        self._metrics = [Owner(part, sets=_SET) for part in module.modules() if isinstance(part, Metric)]
        # The defaults of metrics' states: `forward` resets to them, to compute the value of the batch alone.
        self._constants = [
            value
            for owner in self._metrics
            for value in owner.object._defaults.values()
            if isinstance(value, torch.Tensor) and get_runtime().device.owns(value)
        ]

    def training(self, batch: Any, known: tuple[Hashable, ...]) -> CallSpec | str:
        """Describes a training step, or says why it is never replayed.

        Args:
            batch: on the device.
            known: other values that the step depends on.
        """
        trainer: Any = self._trainer
        around = self._reason_around()
        if around is not None:
            return around
        known = (
            *known,
            trainer.accumulate_grad_batches,
            trainer.gradient_clip_val,
            str(trainer.gradient_clip_algorithm),
            trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward,
            *map(id, trainer.optimizers),
        )
        return self._describe("training_step", batch, known)

    def evaluation(self, name: str, batch: Any, known: tuple[Hashable, ...]) -> CallSpec | str:
        """Describes a step of evaluation or prediction, or says why it is never replayed.

        Args:
            name: `"validation_step"`, `"test_step"` or `"predict_step"`.
            batch: on the device.
            known: other values that the step depends on.
        """
        return _strategy_reason(self._trainer.strategy) or self._describe(name, batch, known)

    def _describe(self, name: str, batch: Any, known: tuple[Hashable, ...]) -> CallSpec | str:
        tensors, batch_key = batch_of(batch)
        if not all(map(get_runtime().device.owns, tensors)):
            return "the batch holds a tensor that is not on the device"
        connector = self._trainer._logger_connector
        # In the first step of an epoch Lightning resets the logged values.
        resets = connector._first_loop_iter, connector._current_fx
        attribute_owners = self._attribute_owners()
        if name not in self._code:
            self._code[name] = step_code(self._module, name, proves=self._proves)
        code = self._code[name].present()
        owners = tuple(id(owner.object) for owner in attribute_owners)
        return CallSpec(
            key=(*batch_key, id(self._module), known, resets, *key_of(code), owners),
            batch=tensors,
            modules=[self._module, *code.modules],
            constants=[*self._constants, *code.tensors],
            look_again=code.look_again,
            reason=self._reason_within() or code.reason or batch_reason(batch),
            attribute_owners=self._attribute_owners,
            watched=self._watched,
            exempt=self._exempt,
            change=code.change,
        )

    def _exempt(self, module: torch.nn.Module) -> Collection[str]:
        if module is not self._module:
            return _UNRELATED
        if not self._proves:
            return {name for name in vars(module) if name.startswith("_")} - _OF_EVERY_MODULE
        # Attributes that the module's code reads are guarded by its `StepCode`; the others are Lightning's.
        return set(vars(module)) - _OF_EVERY_MODULE

    def _attribute_owners(self) -> list[Owner]:
        results = self._trainer._results
        logged = [] if results is None else [_logged(value) for value in results.values()]
        if results is not None:
            logged.append(Owner(results, ("batch_size",)))
        return [*logged, *self._metrics, Owner(self._trainer._logger_connector, ("_current_fx",))]

    def _watched(self) -> Mapping[str, object]:
        schedulers = [config.scheduler for config in self._trainer.lr_scheduler_configs]
        return {
            "what waits for the end of the step": self._deferred(),
            "the count of a scheduler": [getattr(scheduler, "last_epoch", None) for scheduler in schedulers],
        }

    # ---- reasons ---------------------------------------------------------------------------------

    def _reason_around(self) -> str | None:
        trainer: Any = self._trainer
        for callback in trainer.callbacks:
            for hook in _WITHIN:
                if getattr(getattr(callback, hook), "__func__", None) is not getattr(Callback, hook):
                    return f"{type(callback).__name__}.{hook} runs in the middle of the step"
        if _overrides(self._module, "optimizer_step"):
            return f"{type(self._module).__name__}.optimizer_step is overridden, and surrounds the step"
        if isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher):
            return "training_step takes its batches from the iterator itself"
        for optimizer in trainer.optimizers:
            if (reason := optimizer_reason(optimizer)) is not None:
                return reason
        plugin = type(trainer.precision_plugin)
        if not plugin.__module__.startswith(_OWN_PACKAGES):
            return f"{plugin.__name__} is a precision plugin of your own"
        return _strategy_reason(trainer.strategy)

    def _reason_within(self) -> str | None:
        if not isinstance(self._trainer.profiler, PassThroughProfiler):
            return f"the {type(self._trainer.profiler).__name__} would miss the parts of the step"
        return None


def _logged(value: Any) -> Owner:
    # The number of samples changes only for a value that is averaged over the epoch.
    counted = not value.is_tensor or value.meta.on_epoch
    return Owner(value, _LOGGED if counted else tuple(set(_LOGGED) - {"cumulated_batch_size"}), _SET)


def _strategy_reason(strategy: Any) -> str | None:
    kind = type(strategy)
    for cls in kind.__mro__:
        if not cls.__module__.startswith(_OWN_PACKAGES):
            for name in ("training_step", "backward", "optimizer_step", "validation_step", "test_step", "predict_step"):
                if name in vars(cls):
                    return f"{cls.__name__}.{name} is overridden, and surrounds the step"
    return None


def _overrides(module: LightningModule, name: str) -> bool:
    return getattr(getattr(module, name), "__func__", None) is not getattr(LightningModule, name)
