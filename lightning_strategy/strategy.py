"""`XLAEagerStrategy`: Lightning's Trainer on any PJRT device, each step one compiled graph."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import CheckpointIO
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from lightning.pytorch.strategies.single_xla import SingleDeviceXLAStrategy
from lightning.pytorch.utilities import find_shared_parameters, set_shared_parameters

from lightning_strategy import sharded_checkpoints
from lightning_strategy.accelerator import XLAEagerAccelerator
from lightning_strategy.checkpoints import RANDOM_STATE, Taken, XLAEagerCheckpointIO, on_host
from lightning_strategy.connector import flags_under_construction
from lightning_strategy.grads import GRADIENTS, put_back
from lightning_strategy.precision import XLAPrecisionFlag, check_plugin, choose_precision, precision_plugin
from lightning_strategy.refusals import check_flags, check_fused, check_runtime, explaining_fused
from lightning_strategy.resuming import asks_for_newest, load_newest
from lightning_strategy.run import Run
from lightning_strategy.run_settings import devices_of, settings_of, show_differences
from lightning_strategy.scheduled_saves import check_options, check_plugin_saves
from lightning_strategy.sharding import (
    AutoShardingOption,
    ShardingOption,
    bring_to_host,
    example_batch,
    make_sharding,
    plan_of,
)
from xla_adapters import XLAConfig, get_backend
from xla_adapters.checkpoint import CheckpointConfig, snapshot
from xla_adapters.compiling import as_if_compiling
from xla_adapters.config import Accumulation, FreeGrads, OnGraphBreak, RngAlgorithm, StepReplay, XLAMode
from xla_adapters.optimizers import eager_reason
from xla_adapters.sharding.dtensor import accept_placements
from xla_adapters.sharding.plan import ShardingPlan
from xla_adapters.transfers import uploading


class XLAEagerStrategy(SingleDeviceXLAStrategy):
    """Trains a LightningModule on the PJRT device of the process.

    Everything runs eagerly; training, validation, test and predict steps are one compiled graph each,
    executed once per batch. A tensor read, a save or a sync inside a step raises, with the line. A step
    that fails, or is interrupted, leaves everything as it was before it.

        L.Trainer(strategy=XLAEagerStrategy()).fit(module, data)
        L.Trainer(strategy="xla_eager", precision="bf16-mixed").fit(module, data)

    Args:
        config: the XLA options as a whole, or singly:
        xla_mode, on_graph_break, compile_eval, max_graphs, free_grads, accumulation, step_replay, rng_algorithm,
        steps_per_execution: see `XLAConfig`.
        precision: `"32-true"`, `"bf16-true"` or `"bf16-mixed"`; the Trainer's `precision=` does the same.
        auto_sharding: shards over all devices of the process, as is planned to cost least. Batches are those of all
            devices together.
        sharding: the same by name (`"dp"`, `"fsdp"`, `"tp"`, `"2d"`, `"auto"`) or as a `ShardingConfig`.
        checkpoint_io: writes and reads checkpoints, which it gets with all tensors on the host.
        checkpoint: when else to save them and how, as a `CheckpointConfig` or its options: in the background, before
            the process is ended, after a time, with a deadline for what hangs.

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
        step_replay: StepReplay | None = None,
        steps_per_execution: int | None = None,
        precision: XLAPrecisionFlag | None = None,
        auto_sharding: AutoShardingOption = None,
        sharding: ShardingOption = None,
        checkpoint_io: CheckpointIO | None = None,
        checkpoint: CheckpointConfig | dict[str, Any] | None = None,
    ) -> None:
        self.checkpoint_config = CheckpointConfig.resolve(checkpoint)
        self.xla_config = XLAConfig.resolve(
            config,
            {
                "xla_mode": xla_mode,
                "on_graph_break": on_graph_break,
                "compile_eval": compile_eval,
                "max_graphs": max_graphs,
                "free_grads": free_grads,
                "accumulation": accumulation,
                "step_replay": step_replay,
                "steps_per_execution": steps_per_execution,
                "rng_algorithm": rng_algorithm,
            },
        )
        flags = flags_under_construction()
        own_precision = choose_precision(precision, flags)
        name = type(self).__name__
        self._sharding = make_sharding(name, self.xla_config, auto_sharding=auto_sharding, sharding=sharding)
        in_parts = self._sharding is not None and self._sharding.saves_parts
        check_options(name, self.checkpoint_config, in_parts=in_parts)
        check_runtime(name, shards=self._sharding is not None)
        self._backend = get_backend()
        if self.xla_config.may_replay:
            # The self-test compiles: now, and not in a run.
            _ = self._backend.replay_works
        self._precision_given = own_precision if precision is not None or flags is not None else None
        self._own_accelerator = XLAEagerAccelerator()
        self._own_plugin: Precision | None = None
        self._run: Run | None = None
        self._random_state: dict[str, Any] | None = None
        self._loaded_from: Any = ""
        SingleDeviceStrategy.__init__(self, device=self._backend.device(), checkpoint_io=checkpoint_io)
        if flags is not None:
            # Chosen by name: the Trainer is being constructed around us, and will not ask again.
            check_flags(flags, type(self).__name__)
            if flags.connector._precision_plugin_flag is None:
                flags.connector._precision_plugin_flag = self.precision_plugin

    # ---- what the Trainer asks for when it is constructed --------------------------------------

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
    def _precision_plugin(self) -> Precision | None:
        flags = flags_under_construction()
        if flags is not None and self._own_plugin is None:
            return precision_plugin(choose_precision(self._precision_given, flags), self._backend.device().type)
        return self._own_plugin

    @_precision_plugin.setter
    def _precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None:
            check_plugin(plugin, self._backend.device().type)
        self._own_plugin = plugin

    @property  # type: ignore[override]
    def precision_plugin(self) -> Precision:
        """One of Lightning's own plugins, for the precision in effect."""
        if self._own_plugin is None:
            return precision_plugin(self._precision_given or "32-true", self._backend.device().type)
        return self._own_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self._precision_plugin = plugin

    @property  # type: ignore[override]
    def checkpoint_io(self) -> CheckpointIO:
        """The user's, or `XLAEagerCheckpointIO`."""
        if self._checkpoint_io is None:
            self._checkpoint_io = XLAEagerCheckpointIO(self.checkpoint_config)
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO) and self._checkpoint_io.checkpoint_io is None:
            self._checkpoint_io.checkpoint_io = XLAEagerCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Under the name `"xla_eager"`."""
        strategy_registry.register(cls.strategy_name, cls, description=cls.__name__)

    # ---- a run ---------------------------------------------------------------------------------

    @property
    def run(self) -> Run:
        """The fit, validation, test or prediction under way."""
        if self._run is None:
            raise RuntimeError(f"{type(self).__name__}: no run is under way; the Trainer starts one")
        return self._run

    @property
    def sharding_plan(self) -> ShardingPlan:
        """How the module is sharded.

        Raises:
            ConfigError: it is not, or no run has begun yet.
        """
        return plan_of(self._sharding, type(self).__name__)

    def setup_environment(self) -> None:
        """Begins a run: eager mode and patches, until `teardown`."""
        check_plugin_saves(type(self).__name__, self.checkpoint_config, self.checkpoint_io)
        super().setup_environment()
        if self._run is None:
            assert self.lightning_module is not None
            self._run = Run(self.lightning_module.trainer, self.xla_config, self._sharding, self.checkpoint_config)
            self._run.begin()

    def setup(self, trainer: Trainer) -> None:
        """Moves the model to the device, and creates optimizers."""
        self.run.check()
        # Not the parent's: it sets and later deletes PT_XLA_DEBUG.
        Strategy.setup(self, trainer)
        self.run.model_is_ready(self._random_state)
        self._random_state = None

    def setup_optimizers(self, trainer: Trainer) -> None:
        """As `Strategy.setup_optimizers`."""
        with explaining_fused():
            super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            check_fused(optimizer)

    def model_to_device(self) -> None:
        """Moves the model; tied weights stay tied. Under sharding its parameters are cut."""
        assert self.model is not None
        if self._sharding is not None:
            accept_placements(self.model)
        with _keeping_ties(self.model), uploading():
            self.model.to(self.root_device)
        if self._sharding is not None:
            assert self.lightning_module is not None
            trainer = self.lightning_module.trainer
            # A run that writes no checkpoint writes no plan.
            folder = Path(trainer.default_root_dir) if trainer.checkpoint_callbacks else None
            self._sharding.prepare(self.lightning_module, lambda: example_batch(trainer), folder)
        self._backend.flush()

    def teardown(self) -> None:
        """Ends the run: nothing pending, the model on the host, flags and patches as before."""
        with ExitStack() as stack:
            if self._run is not None:
                stack.callback(self._forget_run)
                self._run.before_teardown()
            model = self.lightning_module
            with _keeping_ties(model):
                if self._sharding is not None:
                    bring_to_host(model, self.optimizers)
                SingleDeviceStrategy.teardown(self)

    def _forget_run(self) -> None:
        run, self._run = self._run, None
        assert run is not None
        run.end()

    # ---- data ----------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """As `Strategy.batch_to_device`; copies cost no execution, transforms on the device one per batch."""
        if self._run is not None:
            self._run.before_upload()
        with uploading():
            batch = super().batch_to_device(batch, device, dataloader_idx)
        if self._sharding is not None:
            self._sharding.place_batch(batch)
        return batch

    # ---- training ------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Opens the training step."""
        self.run.begin_batch(batch, batch_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `Strategy.training_step`."""
        with self.run.steps.computing():
            return super().training_step(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As `Strategy.backward`."""
        with self.run.steps.computing():
            return super().backward(*args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """As `Strategy.optimizer_step`; under automatic optimization the step ends behind the update."""
        if self.xla_config.xla_mode == "eager+dynamo" and eager_reason(_innermost(optimizer)) is None:
            # The model's graphs are dynamo's; only clipping and update are one of ours.
            loss = closure()
            closure = functools.partial(_given, loss)
        with self.run.update(closure), as_if_compiling(False):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    # ---- evaluation ----------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        """Counts the batches of this evaluation."""
        self.run.steps.begin_evaluation()

    def on_test_start(self) -> None:
        """Counts the batches of this evaluation."""
        self.run.steps.begin_evaluation()

    def on_predict_start(self) -> None:
        """Counts the batches of this prediction."""
        self.run.steps.begin_evaluation()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `Strategy.validation_step`: one graph under `compile_eval`."""
        with self.run.evaluation_step("validation_step", args) as step:
            return step.outputs(super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `Strategy.test_step`: one graph under `compile_eval`."""
        with self.run.evaluation_step("test_step", args) as step:
            return step.outputs(super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `Strategy.predict_step`: one graph under `compile_eval`."""
        with self.run.evaluation_step("predict_step", args) as step:
            return step.outputs(super().predict_step, *args, **kwargs)

    # ---- checkpoints ---------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Saves a copy on the host, with random numbers, and gradients if an update is not done.

        Raises:
            CheckpointSaveError: called inside a step.
        """
        if self._run is not None:
            self._run.before_save(filepath)
            resumable = "optimizer_states" in checkpoint
            checkpoint = {**checkpoint, RANDOM_STATE: self._run.state(with_gradients=resumable)}
            if isinstance(self.checkpoint_io, XLAEagerCheckpointIO):
                self.checkpoint_io.settings = self._settings()
                self.checkpoint_io.devices = devices_of(self._sharding)
        if self._sharding is not None and self._sharding.saves_parts:
            io = sharded_checkpoints.check_io(type(self).__name__, self.checkpoint_io)
            assert self.lightning_module is not None
            sharded_checkpoints.save(io, checkpoint, filepath, self.lightning_module, self.optimizers)
        else:
            copied = Taken(snapshot(checkpoint)) if self.checkpoint_config.asynchronous else on_host(checkpoint)
            super().save_checkpoint(copied, filepath, storage_options)
        if self._run is not None:
            self._run.after_save()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """As `Strategy.load_checkpoint`; a fit that looks for the last one goes on from the newest that is valid.

        Raises:
            CheckpointDamagedError: it is not what was written, and was asked for by its path (or none is valid).
        """
        if self._run is None or not asks_for_newest():
            checkpoint = self._load(checkpoint_path, weights_only)
        else:
            load = functools.partial(self._load, weights_only=weights_only)
            checkpoint_path, checkpoint = load_newest(checkpoint_path, load)
            self._run.resumes_from(checkpoint_path)
        self._random_state, self._loaded_from = checkpoint.get(RANDOM_STATE), checkpoint_path
        return checkpoint

    def _settings(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return settings_of(self.lightning_module.trainer, self.xla_config, self._sharding)

    def _load(self, checkpoint_path: Any, weights_only: bool | None) -> dict[str, Any]:
        checkpoint: dict[str, Any]
        if sharded_checkpoints.is_sharded(checkpoint_path):
            checkpoint = sharded_checkpoints.read_rest(checkpoint_path, weights_only)
        else:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """As `Strategy.load_model_state_dict`; on the device it is one execution, not one per weight."""
        if sharded_checkpoints.FOLDER in checkpoint:
            assert self.lightning_module is not None
            sharded_checkpoints.load_weights(checkpoint, self.lightning_module, strict=strict)
            return
        with uploading():
            super().load_model_state_dict(checkpoint, strict)
        self._backend.flush()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """As `Strategy.load_optimizer_state_dict`; gradients that were accumulated come with it."""
        assert self.lightning_module is not None
        if sharded_checkpoints.FOLDER in checkpoint:
            sharded_checkpoints.load_optimizers(checkpoint, self.lightning_module, self.optimizers)
            load = functools.partial(sharded_checkpoints.load_accumulated, checkpoint, self.lightning_module)
        else:
            with uploading():
                super().load_optimizer_state_dict(checkpoint)
            gradients = checkpoint.get(RANDOM_STATE, {}).get(GRADIENTS, {})
            load = functools.partial(put_back, self.lightning_module, gradients)
        self.run.resumes_gradients(load)
        show_differences(self._loaded_from, self._settings(), self._sharding)

    def on_exception(self, exception: BaseException) -> None:
        """Leaves nothing behind of the step under way."""
        if self._run is not None:
            self._run.steps.abort()


@contextmanager
def _keeping_ties(model: torch.nn.Module | None) -> Iterator[None]:
    """Moving a module to or from XLA makes a new parameter of each name; shared ones are shared again after it."""
    shared = find_shared_parameters(model) if model is not None else []
    yield
    if model is not None:
        set_shared_parameters(model, shared)


def _innermost(optimizer: Any) -> torch.optim.Optimizer:
    return getattr(optimizer, "optimizer", optimizer)  # type: ignore[no-any-return]


def _given(value: Any) -> Any:
    return value
