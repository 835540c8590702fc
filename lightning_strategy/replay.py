"""What Lightning's loops must know of replayed steps: which ones may be, and what stands for their Python."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.profilers import PassThroughProfiler
from torch.utils._pytree import tree_flatten
from torchmetrics import Metric

from lightning_strategy.own_code import StepCode
from lightning_strategy.step_driver import StepDriver
from xla_adapters import get_backend
from xla_adapters.nested_values import as_dicts
from xla_adapters.patching import replaced
from xla_adapters.program import ReplayRequest
from xla_adapters.replay.bound import Owner
from xla_adapters.replay.values import is_simple

_OWN_PACKAGES = ("lightning.", "lightning_strategy.")
# Hooks of callbacks that run in the middle of a training step.
_WITHIN = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
# What `self.log` changes in the place where it gathers a value.
_GATHERED = ("value", "cumulated_batch_size", "_forward_cache", "_computed", "_update_count", "has_reset")
# What an update of a metric sets, whatever it was.
_SET = ("_computed", "has_reset")
# Lightning notes there which hook it is in.
_UNRELATED = frozenset({"_current_fx_name"})


class ReplayRules:
    """Says of each step of a run whether it may be replayed, and what it depends on.

    Args:
        trainer: runs the loops.
        module: is trained.
        waiting: how many updates of metrics wait for the end of the step.
        proves: whether the module's own code must be shown to be without effects.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, waiting: Callable[[], int], *, proves: bool) -> None:
        self._trainer: Any = trainer
        self._module = module
        self._waiting = waiting
        self._proves = proves
        self._code: dict[str, StepCode] = {}
        self._metrics = [Owner(part, sets=_SET) for part in module.modules() if isinstance(part, Metric)]
        # What metrics begin with: `forward` goes back to it for a value of the batch alone.
        self._constants = [
            value
            for owner in self._metrics
            for value in owner.object._defaults.values()
            if isinstance(value, torch.Tensor) and get_backend().is_backend_tensor(value)
        ]

    def training(self, batch: Any, known: tuple[Hashable, ...]) -> ReplayRequest | str:
        """What a replay must know of a training step, or why it is never replayed.

        Args:
            batch: on the device.
            known: what else the step depends on.
        """
        trainer: Any = self._trainer
        around = self._obstacle_around()
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
        return self._request("training_step", batch, known)

    def evaluation(self, name: str, batch: Any, known: tuple[Hashable, ...]) -> ReplayRequest | str:
        """What a replay must know of a step of evaluation or prediction, or why it is never replayed.

        Args:
            name: of the step.
            batch: on the device.
            known: what else the step depends on.
        """
        return _strategy_obstacle(self._trainer.strategy) or self._request(name, batch, known)

    def _request(self, name: str, batch: Any, known: tuple[Hashable, ...]) -> ReplayRequest | str:
        leaves, spec = tree_flatten(as_dicts(batch))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not all(map(get_backend().is_backend_tensor, tensors)):
            return "the batch holds a tensor that is not on the device"
        shapes = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)
        connector = self._trainer._logger_connector
        # The first step of an epoch resets what was gathered.
        resets = connector._first_loop_iter, connector._current_fx
        bound = self._bound()
        if name not in self._code:
            self._code[name] = StepCode(self._module, name, proves=self._proves)
        else:
            self._code[name].follow()
        key = (
            str(spec),
            shapes,
            id(self._module),
            known,
            resets,
            self._code[name].generation,
            tuple(id(owner.object) for owner in bound),
        )
        return ReplayRequest(
            key=key,
            batch=tensors,
            modules=[self._module],
            constants=self._constants,
            obstacle=self._obstacle_within(name, leaves),
            bound=self._bound,
            watched=self._watched,
            unrelated=self._unrelated,
            change=self._code[name].change,
        )

    def _unrelated(self, module: torch.nn.Module) -> Collection[str]:
        if module is not self._module or not self._proves:
            return _UNRELATED
        # What the module's own code reads of its own attributes was noted when the code was examined.
        return _UNRELATED | {key for key in vars(module) if not key.startswith("_") and key != "training"}

    def _bound(self) -> list[Owner]:
        results = self._trainer._results
        logged = [] if results is None else [_gathered(value) for value in results.values()]
        if results is not None:
            logged.append(Owner(results, ("batch_size",)))
        return [*logged, *self._metrics, Owner(self._trainer._logger_connector, ("_current_fx",))]

    def _watched(self) -> Mapping[str, object]:
        schedulers = [config.scheduler for config in self._trainer.lr_scheduler_configs]
        return {
            "what waits for the end of the step": self._waiting(),
            "the count of a scheduler": [getattr(scheduler, "last_epoch", None) for scheduler in schedulers],
        }

    # ---- obstacles ---------------------------------------------------------------------------------

    def _obstacle_around(self) -> str | None:
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
            own = vars(optimizer).get("step")
            if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
                return f"the method step of {type(optimizer).__name__} was replaced"
            if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
                return f"{type(optimizer).__name__} has a hook, whose Python a replay would leave out"
        plugin = type(trainer.precision_plugin)
        if not plugin.__module__.startswith(_OWN_PACKAGES):
            return f"{plugin.__name__} is a precision plugin of your own"
        return _strategy_obstacle(trainer.strategy)

    def _obstacle_within(self, name: str, leaves: list[Any]) -> str | None:
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) and not is_simple(leaf):
                kind = type(leaf).__name__
                return f"the batch holds a {kind}, which cannot be compared with that of another step"
        if not isinstance(self._trainer.profiler, PassThroughProfiler):
            return f"the {type(self._trainer.profiler).__name__} would miss the parts of the step"
        return self._code[name].obstacle


def _gathered(value: Any) -> Owner:
    # Without a mean over the epoch the number of samples stays as a reset leaves it.
    counted = not value.is_tensor or value.meta.on_epoch
    return Owner(value, _GATHERED if counted else tuple(set(_GATHERED) - {"cumulated_batch_size"}), _SET)


def _strategy_obstacle(strategy: Any) -> str | None:
    kind = type(strategy)
    for cls in kind.__mro__:
        if not cls.__module__.startswith(_OWN_PACKAGES):
            for name in ("training_step", "backward", "optimizer_step", "validation_step", "test_step", "predict_step"):
                if name in vars(cls):
                    return f"{cls.__name__}.{name} is overridden, and surrounds the step"
    return None


def _overrides(module: LightningModule, name: str) -> bool:
    return getattr(getattr(module, name), "__func__", None) is not getattr(LightningModule, name)


@contextmanager
def replaying_loops(trainer: Trainer, steps: StepDriver) -> Iterator[None]:
    """Lets the loops call the executable in the place of all that a training step does, until the exit."""
    loop = trainer.fit_loop.epoch_loop
    with ExitStack() as stack:
        stack.enter_context(replaced(loop.automatic_optimization, "run", _automatic(trainer, steps)))
        stack.enter_context(replaced(loop.manual_optimization, "run", _manual(trainer, steps)))
        yield


def _automatic(trainer: Trainer, steps: StepDriver) -> Callable[..., Any]:
    fit = trainer.fit_loop
    loop = fit.epoch_loop.automatic_optimization
    stock = loop.run

    def run(optimizer: Any, batch_idx: int, kwargs: Any) -> Any:
        if not steps.train.is_replaying:
            outputs = stock(optimizer, batch_idx, kwargs)
            # Where an update ended the step, this comes too late, and was done before.
            steps.train.keep("outputs", outputs)
            return outputs
        progress = loop.optim_progress.optimizer
        if not fit._should_accumulate():
            progress.step.increment_ready()
        outputs = steps.replayed()
        if batch_idx % trainer.accumulate_grad_batches == 0 and not loop._skip_backward:
            progress.zero_grad.increment_ready()
            progress.zero_grad.increment_started()
            progress.zero_grad.increment_completed()
        if not fit._should_accumulate():
            progress.step.increment_completed()
        return outputs

    return run


def _manual(trainer: Trainer, steps: StepDriver) -> Callable[..., Any]:
    loop = trainer.fit_loop.epoch_loop.manual_optimization
    stock = loop.run

    def run(kwargs: Any) -> Any:
        progress = loop.optim_step_progress
        if not steps.train.is_replaying:
            before = progress.total.completed
            outputs = stock(kwargs)
            steps.train.keep("outputs", outputs)
            steps.train.keep("updates", progress.total.completed - before)
            return outputs
        updates = steps.train.promise("updates")
        outputs = steps.replayed()
        for _ in range(updates):
            progress.increment_ready()
            progress.increment_completed()
        return outputs

    return run


def keep_outputs(steps: StepDriver, closure: Any) -> None:
    """Notes what the loop is going to hand out when the update has ended the step.

    Args:
        steps: of the run.
        closure: that the loop gave the optimizer. Another one cannot be kept, and so the step is not replayed.
    """
    result = closure._result if isinstance(closure, Closure) else None
    if result is None:
        steps.train.keep("outputs", closure)
        return
    steps.train.keep("outputs", {} if result.loss is None else result.asdict())
    # The closure holds it until the loop goes on.
    steps.train.keep("loss before it is detached", result.closure_loss)
