"""`XLAEagerFabricStrategy`: a loop of one's own with Lightning Fabric on any PJRT device."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar, overload

import torch
from lightning.fabric.plugins import CheckpointIO, Precision
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.strategies.single_device import SingleDeviceStrategy
from lightning.fabric.strategies.single_xla import SingleDeviceXLAStrategy
from torch.optim import Optimizer

from lightning_strategy import fabric_launch, sharded_checkpoints
from lightning_strategy.accelerator import XLAEagerAccelerator
from lightning_strategy.checkpoints import RANDOM_STATE, XLAEagerCheckpointIO, on_host
from lightning_strategy.connector import flags_under_construction
from lightning_strategy.fabric_steps import FabricStep, FabricSteps, made_or_applied
from lightning_strategy.precision import XLAPrecisionFlag, check_plugin, choose_precision, fabric_precision
from lightning_strategy.refusals import check_flags, check_fused, check_runtime
from lightning_strategy.run_settings import show_differences
from lightning_strategy.sharding import AutoShardingOption, ShardingOption, make_sharding, plan_of
from xla_adapters import XLAConfig, get_backend, in_step
from xla_adapters.compiling import as_if_compiling
from xla_adapters.config import Accumulation, FreeGrads, OnGraphBreak, RngAlgorithm, XLAMode
from xla_adapters.errors import BreakKind, ConfigError, UnsupportedOptionError
from xla_adapters.optimizers import eager_reason
from xla_adapters.sharding.dtensor import accept_placements
from xla_adapters.sharding.plan import ShardingPlan
from xla_adapters.step_scope import current_scope
from xla_adapters.transfers import uploading

_Function = TypeVar("_Function", bound=Callable[..., Any])


class XLAEagerFabricStrategy(SingleDeviceXLAStrategy):
    """Lets `Fabric` train on the PJRT device of the process; the loop is yours, and you mark its steps.

    What lies in a step is one compiled graph, executed once at its end. A tensor read, a save or a
    sync inside raises, with the line. A step that fails, or is interrupted, leaves everything as it
    was before it. Each step draws the random numbers of its place in the training: runs repeat after
    `seed_everything`, and go on exactly from a checkpoint.

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

    From `fabric.launch()` on the process is in eager mode: what lies outside of steps executes at
    once. `fabric.strategy.teardown()` ends that.

    Args:
        config: the XLA options as a whole, or singly:
        xla_mode, on_graph_break, compile_eval, max_graphs, free_grads, accumulation, rng_algorithm: see `XLAConfig`.
            How gradients are accumulated is up to the loop: a step for each micro batch, or one for all of them.
        precision: `"32-true"`, `"bf16-true"` or `"bf16-mixed"`; Fabric's `precision=` does the same.
        auto_sharding: shards over all devices of the process; without data to plan with that is `"fsdp"`. Batches are
            those of all devices together.
        sharding: the same by name (`"dp"`, `"fsdp"`, `"tp"`, `"2d"`, `"auto"`) or as a `ShardingConfig`.
        checkpoint_io: writes and reads checkpoints, which it gets with all tensors on the host.

    Raises:
        ConfigError: an option is not valid, or given twice.
        UnsupportedOptionError: an option cannot work on XLA.
        RuntimeOrderError: the runtime was started in another way before.
    """

    strategy_name = "xla_eager"

    def __init__(
        self,
        config: XLAConfig | None = None,
        *,
        xla_mode: XLAMode | None = None,
        on_graph_break: OnGraphBreak | None = None,
        compile_eval: bool | None = None,
        max_graphs: int | None = None,
        free_grads: FreeGrads | None = None,
        accumulation: Accumulation | None = None,
        rng_algorithm: RngAlgorithm | None = None,
        precision: XLAPrecisionFlag | None = None,
        auto_sharding: AutoShardingOption = None,
        sharding: ShardingOption = None,
        checkpoint_io: CheckpointIO | None = None,
    ) -> None:
        self.xla_config = XLAConfig.resolve(
            config,
            {
                "xla_mode": xla_mode,
                "on_graph_break": on_graph_break,
                "compile_eval": compile_eval,
                "max_graphs": max_graphs,
                "free_grads": free_grads,
                "accumulation": accumulation,
                "rng_algorithm": rng_algorithm,
            },
        )
        if self.xla_config.accumulation == "unrolled":
            raise UnsupportedOptionError(
                "accumulation='unrolled' with Fabric: the loop is yours; put one `with fabric.strategy.step():` around "
                "all micro batches of an update instead"
            )
        if self.xla_config.needs_replay is not None:
            raise UnsupportedOptionError(
                f"{self.xla_config.needs_replay} with Fabric: the body of a `with` block cannot be left out; make the "
                "step a function and decorate it with xla_adapters.CompiledStep"
            )
        flags = flags_under_construction()
        own_precision = choose_precision(precision, flags)
        name = type(self).__name__
        self._sharding = make_sharding(name, self.xla_config, auto_sharding=auto_sharding, sharding=sharding)
        check_runtime(name, shards=self._sharding is not None)
        self._backend = get_backend()
        self._precision_given = own_precision if precision is not None or flags is not None else None
        self._own_accelerator = XLAEagerAccelerator()
        self._own_plugin: Precision | None = None
        self._steps = FabricSteps(self.xla_config, self._sharding)
        self._told: set[str] = set()
        self._held = ExitStack()
        SingleDeviceStrategy.__init__(self, device=self._backend.device(), checkpoint_io=checkpoint_io)
        if flags is not None:
            # Chosen by name: Fabric is being constructed around us, and will not ask again.
            check_flags(flags, type(self).__name__)
            flags.connector.accelerator = self._own_accelerator
            if flags.connector._precision_instance is None:
                flags.connector._precision_instance = self.precision

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
            function: the function, if used as a bare decorator.
            name: of the step in messages. Different steps of one loop (a generator's and a
                discriminator's) deserve different names.
            inputs: the batch, to explain compiles by; the one the loader handed out last by default.

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

        As `step`, with random numbers of its own: a training does not notice that it is evaluated.
        """
        return made_or_applied(FabricStep(self._steps, "eval", name=name, inputs=inputs), function)

    @property
    def step_count(self) -> int:
        """Training steps done since the seed was set; goes on from a checkpoint."""
        return self._steps.count

    @property
    def sharding_plan(self) -> ShardingPlan:
        """How the model that was set up last is sharded.

        Raises:
            ConfigError: it is not, or none was set up yet.
        """
        return plan_of(self._sharding, type(self).__name__)

    # ---- what Fabric asks for when it is constructed -------------------------------------------

    @property
    def _accelerator(self) -> Any:
        flags = flags_under_construction()
        if flags is not None:
            check_flags(flags, type(self).__name__)
            if flags.accelerator != "auto":
                # Given explicitly, and the same device; Lightning wants only one of us to name it.
                return None
        return self._own_accelerator

    @_accelerator.setter
    def _accelerator(self, accelerator: Any) -> None:
        """Lightning sets what it chose for the flag `"auto"`; the device is ours all the same."""

    @property
    def _precision(self) -> Precision | None:
        flags = flags_under_construction()
        if flags is None or self._own_plugin is not None:
            return self._own_plugin
        if flags.connector._precision_instance is not None and self._precision_given is None:
            return None
        return fabric_precision(choose_precision(self._precision_given, flags), self._backend.device().type)

    @_precision.setter
    def _precision(self, plugin: Precision | None) -> None:
        if plugin is not None:
            check_plugin(plugin, self._backend.device().type)
        self._own_plugin = plugin

    @property  # type: ignore[override]
    def precision(self) -> Precision:
        """One of Lightning's own plugins, for the precision in effect."""
        if self._own_plugin is None:
            return fabric_precision(self._precision_given or "32-true", self._backend.device().type)
        return self._own_plugin

    @precision.setter
    def precision(self, plugin: Precision | None) -> None:
        self._precision = plugin

    @property  # type: ignore[override]
    def checkpoint_io(self) -> CheckpointIO:
        """The user's, or `XLAEagerCheckpointIO`."""
        if self._checkpoint_io is None:
            self._checkpoint_io = XLAEagerCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Under the name `"xla_eager"`."""
        strategy_registry.register(cls.strategy_name, cls, description=cls.__name__)

    # ---- launch and end ------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Begins at `fabric.launch()`: eager mode and patches, until `teardown`."""
        super().setup_environment()
        if not self._steps.is_launched:
            fabric_launch.begin(self._steps)
            self._steps.is_launched = True

    def teardown(self) -> None:
        """Ends what `fabric.launch()` began: flags and patches are as before. Fabric itself never calls it."""
        super().teardown()
        self._held.close()
        if self._steps.is_launched:
            self._steps.is_launched = False
            fabric_launch.end(self._steps)

    # ---- model, optimizers, data ---------------------------------------------------------------

    def module_to_device(self, module: torch.nn.Module) -> None:
        """Moves the module. Its parameters stay the objects they were: optimizers know them, ties hold."""
        if self._sharding is not None and (placed := accept_placements(module)):
            raise ConfigError(
                f"{placed[0]} is a DTensor, of which a plain parameter was made, and an optimizer would update the "
                "former one: call xla_adapters.sharding.dtensor.accept_placements(module) before the optimizer is made"
            )
        with uploading(), _same_parameters():
            module.to(self.root_device)
        if not in_step():
            self._backend.flush()
        self._steps.note_module(module)

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """As `Strategy.setup_module`; under sharding its parameters are cut.

        Under `xla_mode="eager+dynamo"` its forward is compiled.
        """
        module = super().setup_module(module)
        if self._sharding is not None:
            self._sharding.prepare(module)
            self._held.enter_context(self._sharding.holding(module))
        if self.xla_config.xla_mode == "eager+dynamo":
            # Not `module.compile()`: dynamo leaves torch's own containers alone there.
            return torch.compile(module, backend=self._backend.dynamo_backend)  # type: ignore[return-value]
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """As `Strategy.setup_optimizer`.

        Raises:
            UnsupportedOptionError: it is a fused one.
        """
        check_fused(optimizer)
        self._steps.note_optimizer(optimizer)
        return super().setup_optimizer(optimizer)

    def batch_to_device(self, batch: Any, device: torch.device | None = None) -> Any:
        """As `Strategy.batch_to_device`; copies cost no execution."""
        with uploading():
            batch = super().batch_to_device(batch, device)
        if self._sharding is not None:
            self._sharding.place_batch(batch)
        return batch

    # ---- the update ----------------------------------------------------------------------------

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """As `Strategy.optimizer_step`."""
        closure = kwargs.get("closure")
        if closure is not None:
            kwargs["closure"] = as_if_compiling()(closure)
        if self._is_outside("optimizer.step()"):
            return super().optimizer_step(optimizer, **kwargs)
        if closure is not None and self._is_dynamo_update(optimizer):
            # The model's graphs are dynamo's; only the update is one of ours.
            kwargs["closure"] = functools.partial(_given, kwargs["closure"]())
        with self._update("optimizer_step", optimizer), as_if_compiling(False):
            return super().optimizer_step(optimizer, **kwargs)

    def clip_gradients_norm(
        self,
        module: torch.nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """As `Strategy.clip_gradients_norm`; inside a step a norm that is not finite raises no error."""
        if error_if_nonfinite and in_step():
            error_if_nonfinite = False
            self._tell(
                "fabric.clip_gradients(max_norm=...) inside a step cannot raise on a norm that is not finite: it would "
                "read the norm before the step is executed. Say error_if_nonfinite=False, and look at the norm it "
                "returns behind the step if you want to know",
                depth=4,
            )
        with self._update("clip_gradients"):
            return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)

    def clip_gradients_value(self, module: torch.nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """As `Strategy.clip_gradients_value`."""
        with self._update("clip_gradients"):
            super().clip_gradients_value(module, optimizer, clip_val)

    @contextmanager
    def _update(self, name: str, optimizer: Optimizer | None = None) -> Iterator[None]:
        with self._steps.own_graph(name) if self._is_dynamo_update(optimizer) else nullcontext():
            yield

    def _is_dynamo_update(self, optimizer: Optimizer | None) -> bool:
        dynamo = self.xla_config.xla_mode == "eager+dynamo" and not in_step()
        return dynamo and (optimizer is None or eager_reason(optimizer) is None)

    def _is_outside(self, what: str) -> bool:
        outside = self.xla_config.compiles_step and not in_step()
        if outside:
            self._tell(
                f"{what} was called outside of a step: each of its operations is executed singly, which is slow. Put "
                "forward, backward and update into `with fabric.strategy.step():`",
                depth=5,
            )
        return outside

    def _tell(self, text: str, *, depth: int) -> None:
        if text not in self._told:
            self._told.add(text)
            warnings.warn(text, stacklevel=depth)

    # ---- checkpoints ---------------------------------------------------------------------------

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Saves a copy on the host. A state with an optimizer is one to go on from: random numbers come along.

        Raises:
            CheckpointSaveError: called inside a step.
        """
        scope = current_scope()
        if scope is not None:
            scope.meet_break(BreakKind.CHECKPOINT_SAVE, f"the checkpoint {os.fspath(path)}")
        in_parts = self._sharding is not None and self._sharding.saves_parts
        whole = {key: value for key, value in state.items() if not in_parts or not _has_parts(value)}
        converted = self._convert_stateful_objects_in_state(whole, filter=filter or {})
        if _is_resumable(state):
            converted[RANDOM_STATE] = self._steps.random_state()
        if in_parts:
            io = sharded_checkpoints.check_io(type(self).__name__, self._checkpoint_io)
            sharded_checkpoints.save_objects(io, state, converted, path, filter or {})
            return
        self.checkpoint_io.save_checkpoint(checkpoint=on_host(converted), path=path, storage_options=storage_options)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """As `Strategy.load_checkpoint`. If an optimizer is in the state, the random numbers go on, too."""
        remainder: dict[str, Any]
        if isinstance(state, dict) and sharded_checkpoints.is_sharded(path):
            remainder = sharded_checkpoints.load_objects(state, path, strict=strict, weights_only=weights_only)
        else:
            with uploading():
                remainder = super().load_checkpoint(path, state, strict, weights_only)
            self._backend.flush()
        if state and not isinstance(state, (torch.nn.Module, Optimizer)):
            random_state = remainder.pop(RANDOM_STATE, None)
            if random_state is not None and _is_resumable(state):
                self._steps.resume(random_state)
                show_differences(path, None, self._sharding)
        return remainder


def _given(value: Any) -> Any:
    return value


def _has_parts(value: Any) -> bool:
    return isinstance(value, (torch.nn.Module, Optimizer))


def _is_resumable(state: dict[str, Any]) -> bool:
    return any(isinstance(value, Optimizer) for value in state.values())


@contextmanager
def _same_parameters() -> Iterator[None]:
    """Moving a module to XLA makes new parameters; with this, their contents are swapped into the old ones."""
    options: Any = torch.__future__
    with ExitStack() as stack:
        stack.callback(options.set_swap_module_params_on_conversion, options.get_swap_module_params_on_conversion())
        options.set_swap_module_params_on_conversion(True)
        yield
