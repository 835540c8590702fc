"""The compiled steps of the Trainer's loops: where each begins and ends, and what is patched for it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim.swa_utils import AveragedModel
from torchmetrics import Metric

import xla_adapters
from lightning_strategy.replay import ReplayRules
from lightning_strategy.shapes import LoaderShapes
from lightning_strategy.sharding import ModuleSharding
from xla_adapters import StepProgram, XLAConfig, get_runtime, in_step
from xla_adapters.errors import CheckpointError
from xla_adapters.loop.gradient_reads import mentions_gradients, schedule_sees_gradients
from xla_adapters.loop.replay import allowed
from xla_adapters.loop.steps import StallWatch, StepDriver, check_loss
from xla_adapters.replay.call_spec import CallSpec
from xla_adapters.runtime.transfers import to_host_in_one_transfer, uploading
from xla_adapters.sharding import DataParallel, own_shard
from xla_adapters.utils.patching import replaced
from xla_adapters.utils.torch_modes import modules_compiled

# Their key in a checkpoint's exact state.
GRADIENTS = "gradients"
# Hooks between the update and the next `zero_grad`, in which user code can read gradients. Those at the end of an epoch
# seldom do, so that they are looked into.
_HOOKS = ("on_train_batch_end", "on_before_zero_grad")
_LATE_HOOKS = ("on_validation_model_zero_grad", "on_train_epoch_end", "on_train_end", "on_save_checkpoint")
_OWN_PACKAGES = ("lightning.", "lightning_strategy.")


def nobody_sees_grads(trainer: Trainer, module: LightningModule) -> bool:
    """Whether no code but the step's own looks at gradients between the update and the next `zero_grad`.

    If so, the step may set the gradients to None: they are no outputs of its graph then.
    """
    if any(is_overridden(hook, module) for hook in (*_HOOKS, "lr_scheduler_step")):
        return False
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    # Its last epoch, for batch norms, has no backward, but one more update, with the gradients of the last batch.
    if any(isinstance(callback, StochasticWeightAveraging) for callback in callbacks):
        return False
    if any(_defines(callback, hook) for callback in callbacks for hook in _HOOKS):
        return False
    if any(schedule_sees_gradients(config.scheduler) for config in trainer.lr_scheduler_configs):
        return False
    late = [getattr(holder, hook, None) for holder in (module, *callbacks) for hook in _LATE_HOOKS]
    return not any(map(mentions_gradients, late))


def accumulated(trainer: Trainer, module: LightningModule, ranks: DataParallel | None) -> dict[str, torch.Tensor]:
    """The gradients that the next batch adds to, by the names of their parameters; empty after an update."""
    if module.automatic_optimization and not trainer.fit_loop._should_accumulate():
        return {}
    if ranks is not None:
        return ranks.gradients(module)
    return {name: value.grad.detach() for name, value in module.named_parameters() if value.grad is not None}


def check_accumulation(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    """Raises if saved gradients were divided by another number of batches than the gradients that they are added to.

    Raises:
        CheckpointError: with what to do.
    """
    then, now = saved.get("accumulates"), trainer.accumulate_grad_batches
    if then is not None and then != now:
        raise CheckpointError(
            f"The checkpoint was saved between the {then} batches of an update, and has the gradients of some of them; "
            f"now an update has {now}: resume with accumulate_grad_batches={then}, or from a checkpoint that was saved "
            "after an update"
        )


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
            value = own_shard(parameter, gradients[name])
            parameter.grad = (
                runtime.transfers.to_device(value) if tiles is None else runtime.spmd.upload_sharded(value, tiles)
            )


def _defines(callback: Callback, hook: str) -> bool:
    # Of the object, not of its class: a callback may be a mock, or have a hook set on it.
    method = getattr(callback, hook)
    function = getattr(method, "__func__", method)
    return function is not getattr(Callback, hook) and not function.__module__.startswith(_OWN_PACKAGES)


@contextmanager
def replaying_loops(trainer: Trainer, steps: StepDriver) -> Iterator[None]:
    """Until the exit, the loops run the executable in place of everything that a replayed training step does."""
    loop = trainer.fit_loop.epoch_loop
    # At the class, and not at the loop: a copy of the Trainer runs its loops as they are.
    with (
        _running(loop.automatic_optimization, _automatic(trainer, steps)),
        _running(loop.manual_optimization, _manual(trainer, steps)),
    ):
        yield


@contextmanager
def _running(loop: Any, run: Callable[..., Any]) -> Iterator[None]:
    kind: Any = type(loop)
    stock = kind.run

    def instead(self: Any, *args: Any) -> Any:
        return run(*args) if self is loop else stock(self, *args)

    with replaced(kind, "run", instead):
        yield


def _automatic(trainer: Trainer, steps: StepDriver) -> Callable[..., Any]:
    """Lightning's loop for automatic optimization; for a replayed step it counts what `loop.run` would count."""
    fit = trainer.fit_loop
    loop = fit.epoch_loop.automatic_optimization
    stock = loop.run

    def run(optimizer: Any, batch_idx: int, kwargs: Any) -> Any:
        if not steps.train.is_replaying:
            outputs = stock(optimizer, batch_idx, kwargs)
            # Does nothing where the update has ended the step: `keep_outputs` was called before.
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
    """Lightning's loop for manual optimization; for a replayed step it counts the recorded number of updates."""
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
    """Notes what the loop is going to return for this step: the update is about to end the step.

    Args:
        steps: of the run.
        closure: what the optimizer was given. A closure that is not the loop's cannot be kept as an output, so that
            the step is not replayed.
    """
    result = closure._result if isinstance(closure, Closure) else None
    if result is None:
        steps.train.keep("outputs", closure)
        return
    steps.train.keep("outputs", {} if result.loss is None else result.asdict())
    # The closure refers to it until the loop goes on.
    steps.train.keep("loss before it is detached", result.closure_loss)


class LoopSteps(Callback):
    """Opens a step for each batch of the Trainer's loops, and ends it.

    A training step is opened by the strategy's `on_train_batch_start`, and ends after the update. This callback, which
    runs before all others, ends it where Lightning has no hook for strategies (accumulation, manual optimization).

    Args:
        trainer: runs the loops.
        driver: opens and closes the steps.
        sharding: of the strategy, if it shards.
        stalls: watches that no batch of an evaluation takes too long.
        shapes: gives batches few shapes.
        ranks: trains together with other processes.
    """

    def __init__(
        self,
        trainer: Trainer,
        driver: StepDriver,
        sharding: ModuleSharding | None,
        stalls: StallWatch,
        shapes: LoaderShapes,
        ranks: DataParallel | None = None,
    ) -> None:
        self._ranks = ranks
        self._trainer = trainer
        self._config = driver.config
        self._driver = driver
        self._sharding = sharding
        self._stalls = stalls
        self._shapes = shapes
        self._rules: ReplayRules | None = None
        self._frees_grads = False
        # The training batch that ended last left its step open for the next one.
        self._is_left_open = False
        # The epoch of the training, or the kind of evaluation.
        self._phase: Hashable = None

    @property
    def _module(self) -> LightningModule:
        module = self._trainer.lightning_module
        assert module is not None
        return module

    def model_is_ready(self, rules: ReplayRules | None) -> None:
        """The optimizers exist: decides whether steps free the gradients.

        Args:
            rules: say which steps may be replayed; None if none may.
        """
        self._rules = rules
        self._shapes.model_is_known(self._module)
        self._frees_grads = self._decide_free_grads()

    def _decide_free_grads(self) -> bool:
        if not self._config.compiles_step or not self._module.automatic_optimization:
            return False
        if self._config.free_grads == "auto":
            return nobody_sees_grads(self._trainer, self._module)
        return bool(self._config.free_grads)

    # ---- the batch -----------------------------------------------------------------------------

    def shaped(self, batch: Any) -> Any:
        """A batch on the host, as the step takes it: of a bucket's length."""
        # What `predict_step` returns is not cut.
        return batch if self._trainer.predicting else self._shapes.padded(batch, trains=self._trainer.training)

    def _enter(self, phase: Hashable) -> None:
        """A batch of a phase begins: at the first one the module is sharded again.

        Callbacks may have replaced the weights in between (averages, say), and what they copy in is not sharded.
        """
        if self._sharding is not None and phase != self._phase and not self._driver.is_open:
            self._sharding.shard_again(self._module)
            self._phase = phase

    def begin(self, batch: Any, batch_idx: int) -> None:
        """Opens the step of a batch, unless the batch before left its own open.

        Args:
            batch: on the device.
            batch_idx: its index in the epoch.

        Raises:
            ConfigError: it is the first batch, and cannot be split over the devices.
        """
        self._is_left_open = False
        if self._sharding is not None:
            self._sharding.check_first_batch(batch)
        self._enter(("train", self._trainer.current_epoch))
        phase, facts = self._described(batch_idx)
        phase += self._shapes.phase(batch, trains=True)
        self._driver.begin(
            batch,
            step=self._trainer.fit_loop.total_batch_idx,
            phase=phase,
            facts=facts,
            where=self._where(batch_idx),
            replay=self._replay_of_training(batch, (*facts.values(), self._frees_grads)),
        )
        if self._ranks is not None and not self._driver.train.is_replaying:
            # A callback may have thawed parameters.
            self._ranks.prepare(self._module)

    def _described(self, batch_idx: int) -> tuple[str, dict[str, Hashable]]:
        """What the step of a batch computes, and what else decides its graph."""
        if not self._module.automatic_optimization:
            return "manual optimization", {}
        # The loop sets gradients to None in the first micro batch.
        first = batch_idx % self._trainer.accumulate_grad_batches == 0
        facts: dict[str, Hashable] = {"gradients": "absent" if first else "present"}
        if self._trainer.fit_loop._should_accumulate() and self._config.accumulation == "per_micro_batch":
            return ("accumulate, first" if first else "accumulate"), facts
        return "update", facts

    def _replay_of_training(self, batch: Any, known: tuple[Hashable, ...]) -> CallSpec | None:
        if self._rules is None or self._driver.is_open:
            return None
        return allowed(self._driver.train, self._rules.training(batch, known))

    def end_accumulation(self) -> None:
        """Executes what is traced of an unrolled accumulation that goes on with the next batch."""
        if self._is_left_open:
            self._driver.end(replays=False)

    # ---- the update ----------------------------------------------------------------------------

    @contextmanager
    def update(self, closure: Any) -> Iterator[None]:
        """Around clipping and update, and what the closure computes before.

        Args:
            closure: what the optimizer was given.
        """
        where = self._where(self._trainer.fit_loop.batch_idx)
        is_own_step = self._driver.begin_update(where)
        with self._driver.discarding():
            yield
            if self._frees_grads:
                # Not the module's own method: the user may have overridden it.
                torch.nn.Module.zero_grad(self._module, set_to_none=True)
            if self._module.automatic_optimization:
                keep_outputs(self._driver, closure)
            if is_own_step or self._module.automatic_optimization:
                self._driver.end(replays=False)

    def _where(self, batch_idx: int) -> str:
        return f"batch {batch_idx} of epoch {self._trainer.current_epoch}"

    # ---- evaluation ----------------------------------------------------------------------------

    @contextmanager
    def evaluation_step(self, name: str, args: tuple[Any, ...]) -> Iterator[StepProgram]:
        """Around one batch.

        Args:
            name: `"validation_step"`, `"test_step"` or `"predict_step"`.
            args: what the loop hands to it: the batch and its index, or an iterator over batches.
        """
        self._stalls.stop()
        self._enter(name)
        takes_batch = len(args) > 1 and isinstance(args[1], int)
        batch, where = (args[0], f"batch {args[1]}") if takes_batch else (None, "")
        replay = self._replay(name, args) if takes_batch else None
        phase = name + self._shapes.phase(batch, trains=False)
        with (
            self._stalls.watching(name),
            self._driver.evaluation_step(name, batch, phase=phase, where=where, replay=replay) as program,
        ):
            yield program

    def _replay(self, name: str, args: tuple[Any, ...]) -> CallSpec | None:
        program = self._driver.evaluation[name]
        if self._rules is None or not self._config.compile_eval or program.is_open:
            return None
        return allowed(program, self._rules.evaluation(name, args[0], args[2:]))

    # ---- events that end a step ------------------------------------------------------------------

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Ends the step of a batch that had no update (accumulation, manual optimization)."""
        unrolled = self._config.accumulation == "unrolled" and self._driver.train.is_open
        accumulates = unrolled and self._module.automatic_optimization and self._trainer.fit_loop._should_accumulate()
        # Its step is that of the next batch, too.
        self._is_left_open = accumulates
        if not accumulates:
            self._driver.end(replays=False)

    def on_sanity_check_start(self, *args: Any, **kwargs: Any) -> None:
        """Evaluation is no part of a training step."""
        self._driver.end(replays=False)

    def on_validation_start(self, *args: Any, **kwargs: Any) -> None:
        """Evaluation is no part of a training step."""
        self._driver.end(replays=False)

    def on_train_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        """Ends the step of a skipped batch or of an incomplete accumulation: its losses can be read."""
        self._driver.end(replays=False)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """As at the end of an epoch; no further batch is loaded, and all ranks must have taken as many steps."""
        self._stalls.stop()
        self._driver.end(replays=False)
        # What the last steps have left to look at: checks of a model, say.
        get_runtime().transfers.deliver_piggy_backed(at_the_end=True)
        if self._ranks is not None:
            self._ranks.ranks.ends(f"fit(), after {self._trainer.global_step} steps")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Discards the step, so that other callbacks find the values of before it."""
        self._driver.abort()


@contextmanager
def callbacks_around(trainer: Trainer, first: Callback, last: Callback) -> Iterator[None]:
    """Until the exit, one callback of ours runs before all callbacks of a Trainer, and one after them.

    They are not among `trainer.callbacks`: users list, compare, copy and profile those.
    """
    stock = call._call_callback_hooks

    @functools.wraps(stock)
    def call_hooks(
        caller: Trainer, hook: str, *args: Any, monitoring_callbacks: bool | None = None, **kwargs: Any
    ) -> None:
        # Lightning calls some hooks twice, the second time for callbacks that monitor a metric.
        is_ours = caller is trainer and monitoring_callbacks is not True
        if is_ours:
            getattr(first, hook)(caller, caller.lightning_module, *args, **kwargs)
        stock(caller, hook, *args, monitoring_callbacks=monitoring_callbacks, **kwargs)
        if is_ours:
            getattr(last, hook)(caller, caller.lightning_module, *args, **kwargs)

    with replaced(call, "_call_callback_hooks", call_hooks):
        yield


@contextmanager
def backward_in_step(trainer: Trainer, steps: StepDriver, ranks: DataParallel | None) -> Iterator[None]:
    """Until the exit, a loop's backward discards the step if it raises, and raises the translated error.

    The strategy has no `backward` of its own: a spy in place of `Strategy.backward` would call it, and it the spy.

    Args:
        trainer: whose loop it is. With manual optimization the backward is a part of `training_step`.
        steps: of the run.
        ranks: exchanges the gradients of the last batch of an update.

    Raises:
        LossError: in the backward, `training_step` returned a loss that is not one number.
    """
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    kind: Any = type(loop)
    stock = kind._make_backward_fn

    def make(self: Any, optimizer: Any) -> Callable[[torch.Tensor], None] | None:
        backward: Callable[[torch.Tensor], None] | None = stock(self, optimizer)
        if self is not loop or backward is None:
            return backward

        def computed(loss: torch.Tensor) -> None:
            module = trainer.lightning_module
            assert module is not None
            # A backward of the user's may take whatever it likes.
            if type(module).backward is LightningModule.backward:
                check_loss(loss, module.training_step)
            is_last = not trainer.fit_loop._should_accumulate()
            with steps.computing(), nullcontext() if ranks is None else ranks.without_exchange(not is_last):
                backward(loss)

        return computed

    with replaced(kind, "_make_backward_fn", make):
        yield


class _HostWeights:
    """Copies of a module's parameters and buffers on the host, with the interface that `AveragedModel` reads."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._values = to_host_in_one_transfer([list(model.parameters()), list(model.buffers())])

    def parameters(self) -> Iterator[torch.Tensor]:
        return iter(self._values[0])

    def buffers(self) -> Iterator[torch.Tensor]:
        return iter(self._values[1])


@contextmanager
def averaging_in_one_graph(config: XLAConfig) -> Iterator[None]:
    """Until the exit, each update of a `torch.optim.swa_utils.AveragedModel` on the device is a step.

    Args:
        config: the options of the run.
    """
    stock: Callable[[Any, Any], None] = AveragedModel.update_parameters

    # The update has no gradients, its graph is not limited, and its Python runs each time.
    config = replace(config.without_graph_limits(), free_grads=False, step_replay=False)

    @functools.wraps(stock)
    def update_parameters(self: Any, model: torch.nn.Module) -> None:
        runtime = get_runtime()
        if in_step() or not all(runtime.device.owns(value) for value in self.module.parameters()):
            stock(self, model)
            return
        # `AveragedModel` reads this count at each update: on the host that costs no transfer.
        self.n_averaged = to_host_in_one_transfer(self.n_averaged)
        if self.n_averaged == 0:
            # The first update copies the weights. A copy on the device would share the weight's buffer, which the
            # next step could not reuse then.
            with uploading():
                stock(self, _HostWeights(model))
            runtime.tracing.flush()
            return
        with xla_adapters.step(name="averaged_weights", config=config):
            stock(self, model)

    if not config.compiles_step:
        yield
        return
    with replaced(AveragedModel, "update_parameters", update_parameters):
        yield


@contextmanager
def compiled_children(module: LightningModule, backend: str) -> Iterator[None]:
    """Compiles the module's children with `torch.compile`, until the exit.

    The code of the LightningModule itself runs as Python: `self.log` and the hooks are in no dynamo graph.

    Args:
        module: on the device.
        backend: the name of the dynamo backend.
    """
    children = [child for child in module.children() if not isinstance(child, Metric)]
    if not children:
        warnings.warn(
            f"xla_mode='eager+dynamo': {type(module).__name__} has no submodules, so nothing of it is compiled; put "
            "the network into an attribute, or use xla_mode='eager+compile'",
            stacklevel=2,
        )
    with modules_compiled(children, backend):
        yield
