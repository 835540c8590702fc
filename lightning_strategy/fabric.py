"""`XLAEagerFabricStrategy`: a loop of the user's own with Lightning Fabric on any PJRT device."""

from __future__ import annotations

import functools
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, TypeVar, Unpack, overload

import torch
from lightning.fabric.plugins import CheckpointIO, Precision
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.single_device import SingleDeviceStrategy
from lightning.fabric.strategies.single_xla import SingleDeviceXLAStrategy
from lightning.fabric.strategies.strategy import Strategy
from torch.optim import Optimizer

from lightning_strategy import sharded_checkpoints as sharded
from lightning_strategy.checkpoints import EXACT_STATE, XLAEagerCheckpointIO, show_differences
from lightning_strategy.connector import FabricPlugins, StrategyHooks, XLAPrecisionFlag
from lightning_strategy.fabric_steps import FabricStep, FabricSteps, begin_launch, end_launch, made_or_applied
from lightning_strategy.refusals import check_fabric_config, check_fused, check_placed, refuse_ranks, start_runtime
from lightning_strategy.sharding import (
    AutoShardingOption,
    ModuleSharding,
    ShardingOption,
    make_sharding,
    on_host,
)
from xla_adapters import XLAConfig, get_runtime, in_step
from xla_adapters.checkpoint import CheckpointConfig
from xla_adapters.config import XLAOptions
from xla_adapters.data.shapes import ShapePolicy
from xla_adapters.errors import BreakKind
from xla_adapters.runtime.transfers import uploading
from xla_adapters.tracing.optimizers import eager_reason, keep_own_kernels
from xla_adapters.tracing.step_scope import current_scope
from xla_adapters.utils.torch_modes import as_if_compiling, keeping_parameters

# From `_warn` to the user's line: the method here, the strategy's hook and Fabric's own method lie between.
_USERS_LINE = 5


class FabricUpdates:
    """Runs `optimizer.step()` and gradient clipping: a part of the step, or a graph of their own.

    Under dynamo a loop without steps has three graphs: the model's forward and backward are dynamo's.

    Args:
        steps: of the strategy.
    """

    def __init__(self, steps: FabricSteps) -> None:
        self._steps = steps
        self._config = steps.config
        self._warned: set[str] = set()

    def step(self, optimizer: Any, run: Callable[..., Any], options: dict[str, Any]) -> Any:
        """Runs `optimizer.step()`; warns if it is outside of a step.

        Args:
            optimizer: Lightning's, or torch's.
            run: the parent class's method.
            options: its keyword arguments, a closure among them or not.
        """
        closure = options.get("closure")
        if closure is not None:
            options["closure"] = as_if_compiling()(closure)
        if self._config.xla_mode == "eager+compile" and not in_step():
            self._warn(
                "optimizer.step() was called outside of a step: each of its operations is executed singly, which is "
                "slow. Put forward, backward and update into `with fabric.strategy.step():`"
            )
            return run(optimizer, **options)
        if closure is not None and self._has_own_graph(optimizer):
            # The model's graphs are dynamo's. Only the update is one of ours.
            options["closure"] = functools.partial(_given, options["closure"]())
        with self.graph("optimizer_step", optimizer), as_if_compiling(False):
            return run(optimizer, **options)

    def may_raise_nonfinite(self, asked: bool) -> bool:
        """Whether clipping may raise on a norm that is not finite: never in a step. Warns if it was asked for.

        Args:
            asked: `error_if_nonfinite` of the user's call.
        """
        if asked and in_step():
            self._warn(
                "fabric.clip_gradients(max_norm=...) inside a step cannot raise on a norm that is not finite: it would "
                "read the norm before the step is executed. Say error_if_nonfinite=False, and look at the norm it "
                "returns behind the step if you want to know"
            )
            return False
        return asked

    def graph(self, name: str, optimizer: Optimizer | None = None) -> AbstractContextManager[None]:
        """Around clipping, or around an optimizer's update: a graph of its own outside of steps under dynamo.

        Args:
            name: of the graph, for messages.
            optimizer: that updates; None for clipping.
        """
        return self._steps.own_graph(name) if self._has_own_graph(optimizer) else nullcontext()

    def _has_own_graph(self, optimizer: Optimizer | None) -> bool:
        dynamo = self._config.xla_mode == "eager+dynamo" and not in_step()
        return dynamo and (optimizer is None or eager_reason(optimizer) is None)

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=_USERS_LINE)


def _given(value: Any) -> Any:
    return value


_Filters = dict[str, Callable[[str, Any], bool]]


class FabricCheckpoints:
    """Adds random numbers to a state that is saved with an optimizer, and restores them when it is loaded.

    Args:
        strategy: whose `checkpoint_io` writes and reads.
        steps: of the strategy.
        sharding: of the strategy, if it shards.
    """

    def __init__(self, strategy: Strategy, steps: FabricSteps, sharding: ModuleSharding | None) -> None:
        self._strategy = strategy
        self._steps = steps
        self._sharding = sharding

    def save(self, path: Any, state: dict[str, Any], storage_options: Any, filters: _Filters) -> None:
        """Saves a copy of the state on the host; under `checkpoints="sharded"` a folder of shards.

        Args:
            path: of the file, or of the folder.
            state: as the user gave it.
            storage_options: of the user, for the `checkpoint_io`.
            filters: by key of a module, a function that says which entries of its state dict are saved.

        Raises:
            CheckpointSaveError: called inside a step.
        """
        scope = current_scope()
        if scope is not None:
            scope.meet_break(BreakKind.CHECKPOINT_SAVE, f"the checkpoint {os.fspath(path)}")
        saves_shards = self._sharding is not None and self._sharding.saves_shards
        whole = {key: value for key, value in state.items() if not saves_shards or not _is_sharded(value)}
        converted = self._strategy._convert_stateful_objects_in_state(whole, filter=filters)
        # A filter may leave nothing of an optimizer.
        saved = {key: value for key, value in state.items() if key in converted or key not in whole}
        random_state = self._steps.random_state() if _is_resumable(saved) else None
        io = self._strategy.checkpoint_io
        if not saves_shards and type(io) is XLAEagerCheckpointIO:
            converted = _beside(on_host(converted), random_state)
            io.save_checkpoint(checkpoint=converted, path=path, storage_options=storage_options)
            return
        if random_state is not None:
            # A plugin may copy the entries alone, and the file of a folder of shards is not for users.
            converted[EXACT_STATE] = random_state
        if saves_shards:
            io = sharded.check_io(type(self._strategy).__name__, io)
            sharded.save_objects(io, state, converted, path, filters)
        else:
            io.save_checkpoint(checkpoint=on_host(converted), path=path, storage_options=storage_options)

    def load(
        self,
        path: Any,
        state: Any,
        load: Callable[..., dict[str, Any]],
        *,
        strict: bool,
        weights_only: bool | None,
    ) -> dict[str, Any]:
        """Loads a checkpoint into the user's objects; returns the entries that the user did not ask for.

        Args:
            path: of the file, or of the folder.
            state: as the user gave it.
            load: the parent class's method, for a checkpoint in one file.
            strict, weights_only: of the user.
        """
        if isinstance(state, dict) and sharded.is_sharded(path):
            io = self._strategy.checkpoint_io
            remainder = sharded.load_objects(io, state, path, strict=strict, weights_only=weights_only)
        else:
            with uploading():
                # Lightning 2.5 knows no such argument.
                said = {} if weights_only is None else {"weights_only": weights_only}
                remainder = load(path, state, strict, **said)
            get_runtime().tracing.flush()
        if state and not isinstance(state, (torch.nn.Module, Optimizer)):
            random_state = _random_state_of(remainder)
            if random_state is not None and _is_resumable(state):
                self._steps.resume(random_state)
                show_differences(path, None, self._sharding)
        return dict(remainder) if _is_beside(remainder) else remainder


# The attribute of a saved state that has the random numbers, so that its entries are the user's alone. torch's state
# dicts keep their versions likewise (`_metadata`).
_ATTRIBUTE = "_xla_adapters"


def _beside(state: dict[str, Any], random_state: dict[str, Any] | None) -> dict[str, Any]:
    """The same state, with the random numbers beside its entries if there are any."""
    if random_state is None:
        return state
    ordered = OrderedDict(state)
    vars(ordered)[_ATTRIBUTE] = random_state
    return ordered


def _is_beside(loaded: dict[str, Any]) -> bool:
    return isinstance(loaded, OrderedDict) and _ATTRIBUTE in vars(loaded)


def _random_state_of(loaded: dict[str, Any]) -> Any:
    """The random numbers of a state that was loaded; those among its entries are taken out."""
    return vars(loaded)[_ATTRIBUTE] if _is_beside(loaded) else loaded.pop(EXACT_STATE, None)


def _is_sharded(value: Any) -> bool:
    return isinstance(value, (torch.nn.Module, Optimizer))


def _is_resumable(state: dict[str, Any]) -> bool:
    return any(isinstance(value, Optimizer) for value in state.values())


_Function = TypeVar("_Function", bound=Callable[..., Any])


class XLAEagerFabricStrategy(StrategyHooks, SingleDeviceXLAStrategy):  # type: ignore[misc]
    """Lets `Fabric` train on the PJRT device of the process; you write the loop, and mark its steps.

    The body of a step is compiled as one graph and executed once, at its end. Reading a tensor, saving a checkpoint or
    a sync inside raises, with the line. A step that fails or is interrupted is discarded: weights, gradients and
    optimizer state are as before it. Random numbers depend on the seed and the number of the step: runs repeat after
    `seed_everything`, and a resumed run computes the same as one that was not interrupted.

        fabric = Fabric(strategy=XLAEagerFabricStrategy(), precision="bf16-mixed")
        fabric.launch()
        model, optimizer = fabric.setup(model, optimizer)
        for inputs, classes in fabric.setup_dataloaders(loader):
            with fabric.strategy.step():
                loss = cross_entropy(model(inputs), classes)
                fabric.backward(loss)
                fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
                optimizer.step()
                optimizer.zero_grad()
            fabric.print(loss.item())

    Once the strategy is constructed the process is in eager mode: operations outside of steps are executed at once.
    `fabric.launch()` adds patches, until `fabric.strategy.teardown()`.

    The methods are Fabric's hooks. What they do is in `FabricSteps`, `FabricUpdates`, `FabricCheckpoints` and
    `connector.plugins.FabricPlugins`.

    Args:
        config: the XLA options as a whole, instead of single ones.
        precision: `"32-true"`, `"bf16-true"` or `"bf16-mixed"`; Fabric's `precision=` does the same.
        auto_sharding: shards the model over all devices of the process; with Fabric there is no data to plan with, and
            the plan is `"fsdp"`. A batch of the loader is for all devices together. Without this or `sharding` one
            device trains.
        sharding: how to shard, by name (`"dp"`, `"fsdp"`, `"tp"`, `"2d"`, `"auto"`) or as a `ShardingConfig`, instead
            of `auto_sharding`.
        checkpoint_io: writes and reads checkpoints; it gets them with all tensors on the host.
        shapes: gives the batches of loaders few shapes, as a `ShapePolicy`, its options, or `"auto"`: lengths are
            padded to those of buckets, and batches of a shuffled loader are formed within these.
        options: the options of `XLAConfig` one by one, instead of `config`. `accumulation` and `step_replay` have no
            effect in a loop of your own, and are refused.

    Raises:
        ConfigError: an option is not valid, or given twice.
        UnsupportedOptionError: an option cannot work on XLA.
        RuntimeOrderError: the XLA runtime was started earlier in a mode that does not fit.
    """

    _plugins: FabricPlugins

    def __init__(
        self,
        config: XLAConfig | None = None,
        *,
        precision: XLAPrecisionFlag | None = None,
        auto_sharding: AutoShardingOption = None,
        sharding: ShardingOption = None,
        checkpoint_io: CheckpointIO | None = None,
        shapes: ShapePolicy | Mapping[str, Any] | str | None = None,
        **options: Unpack[XLAOptions],
    ) -> None:
        self.xla_config = XLAConfig.resolve(config, options)
        check_fabric_config(self.xla_config)
        self.checkpoint_config = CheckpointConfig()
        name = type(self).__name__
        self._plugins = FabricPlugins(name, precision)
        refuse_ranks(name)
        self._sharding, *_ = make_sharding(name, self.xla_config, auto_sharding=auto_sharding, sharding=sharding)
        start_runtime(name, self.xla_config, shards=self._sharding is not None)
        self._runtime = get_runtime()
        self._steps = FabricSteps(self.xla_config, self._sharding, ShapePolicy.resolve(shapes))
        self._updates = FabricUpdates(self._steps)
        self._checkpoints = FabricCheckpoints(self, self._steps, self._sharding)
        self._lasting = ExitStack()
        SingleDeviceStrategy.__init__(self, device=self._runtime.device.torch_device(), checkpoint_io=checkpoint_io)
        self._plugins.set_plugins()

    # ---- steps ---------------------------------------------------------------------------------

    @overload
    def step(self, function: _Function, /) -> _Function: ...

    @overload
    def step(self, function: None = None, /, *, name: str | None = None, inputs: Any = None) -> FabricStep: ...

    def step(
        self, function: Callable[..., Any] | None = None, /, *, name: str | None = None, inputs: Any = None
    ) -> Any:
        """Marks one training step, as a context manager or a decorator: one graph, executed once.

        Args:
            function: the function, if used as a decorator without arguments.
            name: of the step in messages. Give different steps of one loop (a generator's and a discriminator's)
                different names.
            inputs: the batch, to explain compiles by; by default the loader's last one.

        Raises:
            RuntimeOrderError: (when entered) before `fabric.launch()`.
            GraphBreakError: (in the body) something would split the graph; see its subclasses.
            GraphLimitError: (at the end) `max_graphs` would be exceeded.
        """
        return made_or_applied(FabricStep(self._steps, "train", name=name, inputs=inputs), function)

    @overload
    def eval_step(self, function: _Function, /) -> _Function: ...

    @overload
    def eval_step(self, function: None = None, /, *, name: str | None = None, inputs: Any = None) -> FabricStep: ...

    def eval_step(
        self, function: Callable[..., Any] | None = None, /, *, name: str | None = None, inputs: Any = None
    ) -> Any:
        """Marks one step of an evaluation or prediction: one graph under `compile_eval`.

        As `step`, but its random numbers are its own: an evaluation does not change the training after it.
        """
        return made_or_applied(FabricStep(self._steps, "eval", name=name, inputs=inputs), function)

    @property
    def step_count(self) -> int:
        """Training steps since the seed was set; a checkpoint that is loaded sets it."""
        return self._steps.count

    # ---- what Fabric asks for when it is constructed -------------------------------------------

    @property
    def _precision(self) -> Precision | None:
        return self._plugins.precision_for_connector()

    @_precision.setter
    def _precision(self, plugin: Precision | None) -> None:
        self._plugins.set_precision(plugin)

    @property  # type: ignore[override]
    def precision(self) -> Precision:
        """One of Lightning's own plugins, for the precision in effect."""
        return self._plugins.precision

    @precision.setter
    def precision(self, plugin: Precision | None) -> None:
        self._plugins.set_precision(plugin)

    # ---- launch and end ------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """As `Strategy.setup_environment`; `fabric.launch()` calls it. Patches torch, until `teardown`."""
        super().setup_environment()
        if not self._steps.is_launched:
            begin_launch(self._steps)
            self._steps.is_launched = True

    def teardown(self) -> None:
        """Undoes what `fabric.launch()` changed in the process. Call it yourself; Fabric never does."""
        super().teardown()
        self._lasting.close()
        if self._steps.is_launched:
            self._steps.is_launched = False
            end_launch(self._steps)

    # ---- model, optimizers, data ---------------------------------------------------------------

    def module_to_device(self, module: torch.nn.Module) -> None:
        """As `Strategy.module_to_device`; parameters stay the same objects, for optimizers and tied weights.

        Raises:
            ConfigError: the strategy shards, and a parameter is a `DTensor`.
        """
        if self._sharding is not None:
            check_placed(module)
        with uploading(), keeping_parameters():
            module.to(self.root_device)
        if not in_step():
            self._runtime.tracing.flush()
        self._steps.note_module(module)

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """As `Strategy.setup_module`: sharded if the strategy shards, its forward compiled under dynamo."""
        module = super().setup_module(module)
        if self._sharding is not None:
            self._sharding.prepare(module)
            self._lasting.enter_context(self._sharding.holding(module))
        if self.xla_config.xla_mode == "eager+dynamo":
            # Not `module.compile()`, with which dynamo does not compile torch's own containers.
            return torch.compile(module, backend=self._runtime.dynamo_backend)  # type: ignore[return-value]
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """As `Strategy.setup_optimizer`.

        Raises:
            UnsupportedOptionError: it is a fused one.
        """
        check_fused(optimizer)
        keep_own_kernels(optimizer)
        self._steps.note_optimizer(optimizer)
        return super().setup_optimizer(optimizer)

    def process_dataloader(self, dataloader: Any) -> Any:
        """As `Strategy.process_dataloader`; with `shapes`, batches of a shuffled loader are formed within buckets."""
        return super().process_dataloader(self._steps.shapes.loader(dataloader))

    def batch_to_device(self, batch: Any, device: torch.device | None = None) -> Any:
        """As `Strategy.batch_to_device`; copies cost no execution."""
        with uploading():
            batch = super().batch_to_device(batch, device)
        if self._sharding is not None:
            self._sharding.place_batch(batch)
        return batch

    # ---- the update ----------------------------------------------------------------------------

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """As `Strategy.optimizer_step`; warns outside of a step."""
        return self._updates.step(optimizer, super().optimizer_step, kwargs)

    def clip_gradients_norm(
        self,
        module: torch.nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """As `Strategy.clip_gradients_norm`; inside a step a norm that is not finite raises no error."""
        raises = self._updates.may_raise_nonfinite(error_if_nonfinite)
        with self._updates.graph("clip_gradients"):
            return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, raises)

    def clip_gradients_value(self, module: torch.nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """As `Strategy.clip_gradients_value`."""
        with self._updates.graph("clip_gradients"):
            super().clip_gradients_value(module, optimizer, clip_val)

    # ---- checkpoints ---------------------------------------------------------------------------

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """As `Strategy.save_checkpoint`: a copy on the host; with random numbers if there is an optimizer in the state.

        Raises:
            CheckpointSaveError: called inside a step.
        """
        self._checkpoints.save(path, state, storage_options, filter or {})

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """As `Strategy.load_checkpoint`; restores random numbers if there is an optimizer in the state."""
        load = super().load_checkpoint
        return self._checkpoints.load(path, state, load, strict=strict, weights_only=weights_only)


# `L.Fabric(strategy="xla_eager")`.
if XLAEagerFabricStrategy.strategy_name not in STRATEGY_REGISTRY:
    XLAEagerFabricStrategy.register_strategies(STRATEGY_REGISTRY)
