"""`XLAEagerStrategy`: Lightning's Trainer on any PJRT device, each step one compiled graph."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch
from lightning.fabric.plugins.io import CheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy, StrategyRegistry
from lightning.pytorch.strategies.single_xla import SingleDeviceXLAStrategy

from lightning_strategy import sharded_checkpoints as sharded
from lightning_strategy.checkpoints import (
    EXACT_STATE,
    XLAEagerCheckpointIO,
    asks_for_newest,
    check_options,
    check_plugin_saves,
    devices_of,
    load_newest,
    settings_of,
    show_differences,
)
from lightning_strategy.connector import StrategyHooks, TrainerPlugins, XLAPrecisionFlag
from lightning_strategy.refusals import check_fused, config_of_run, explaining_fused, start_runtime
from lightning_strategy.report import FitReport
from lightning_strategy.run import Run, base_seed
from lightning_strategy.shapes import LoaderShapes
from lightning_strategy.sharding import (
    AutoShardingOption,
    HostCopy,
    ModuleSharding,
    RankHooks,
    ShardingOption,
    bring_to_host,
    keeping_ties,
    make_sharding,
    on_host,
    optimizers_following,
    prepare_for_run,
)
from lightning_strategy.steps import GRADIENTS, load_gradients
from xla_adapters import StepProgram, XLAConfig, get_runtime
from xla_adapters.checkpoint import CheckpointConfig, snapshot
from xla_adapters.config import XLAOptions
from xla_adapters.data.shapes import ShapePolicy
from xla_adapters.errors import hide_own_frames
from xla_adapters.insight.run_report import RunReport
from xla_adapters.loop.replay import copies
from xla_adapters.runtime.transfers import uploading
from xla_adapters.sharding import accept_placements, for_first_rank
from xla_adapters.tracing.optimizers import keep_own_kernels
from xla_adapters.utils.nested_values import tensors_in
from xla_adapters.utils.torch_modes import as_if_compiling

if TYPE_CHECKING:
    from xla_adapters.tools.preflight_report import PreflightReport


class TrainerCheckpoints:
    """Adds to Lightning's checkpoints what an exact resume needs, and reads it back.

    Args:
        strategy: whose module and optimizers are saved, and whose `checkpoint_io` writes.
        config: the XLA options.
        checkpoint: how to save.
        sharding: of the strategy, if it shards.
    """

    def __init__(
        self, strategy: Strategy, config: XLAConfig, checkpoint: CheckpointConfig, sharding: ModuleSharding | None
    ) -> None:
        self._strategy = strategy
        self._config = config
        self._checkpoint = checkpoint
        self._sharding = sharding
        self._loaded_from: Any = ""
        self._exact_state: dict[str, Any] | None = None
        self._gradients: dict[str, torch.Tensor] = {}

    @property
    def _module(self) -> LightningModule:
        module = self._strategy.lightning_module
        assert module is not None
        return module

    # ---- saving --------------------------------------------------------------------------------

    def save(self, run: Run | None, checkpoint: dict[str, Any], path: Any, write: Callable[[Any, Any], None]) -> None:
        """Saves a checkpoint; between `run.before_save` and `run.after_save` if a run is under way.

        Args:
            run: the run under way.
            checkpoint: what Lightning saves, on the device.
            path: where to.
            write: the parent class's method, which gets a checkpoint on the host and the path.
        """
        if run is not None:
            run.before_save(path)
            resumable = "optimizer_states" in checkpoint
            checkpoint = {**checkpoint, EXACT_STATE: run.exact_state(with_gradients=resumable)}
        io = self._strategy.checkpoint_io
        if run is not None and isinstance(io, XLAEagerCheckpointIO):
            io.settings = self._settings()
            io.devices = devices_of(self._sharding)
        if self._sharding is not None and self._sharding.saves_shards:
            io = sharded.check_io(type(self._strategy).__name__, io)
            sharded.save(io, checkpoint, path, self._module, self._strategy.optimizers)
        else:
            write(HostCopy(snapshot(checkpoint)) if self._checkpoint.asynchronous else on_host(checkpoint), path)
        if run is not None:
            run.after_save(path)

    def _settings(self) -> dict[str, Any]:
        return settings_of(self._module.trainer, self._config, self._sharding)

    # ---- loading -------------------------------------------------------------------------------

    def load(
        self, run: Run | None, path: Any, read: Callable[[Any], dict[str, Any]], *, weights_only: bool | None
    ) -> dict[str, Any]:
        """Loads a checkpoint; a fit that looks for the last one resumes from the newest that is valid.

        Args:
            run: the run under way.
            path: what the Trainer found, or the user gave.
            read: the parent class's method, for a checkpoint in one file.
            weights_only: as for `torch.load`, for a sharded checkpoint.

        Raises:
            CheckpointDamagedError: it is not what was written, and the user gave its path (or none is valid).
        """

        def load(path: Any) -> dict[str, Any]:
            if sharded.is_sharded(path):
                return sharded.read_rest(self._strategy.checkpoint_io, path, weights_only)
            return read(path)

        if run is not None and asks_for_newest():
            found = path
            path, checkpoint = load_newest(found, load)
            if os.fspath(path) != os.fspath(found):
                run.resumes_from(path)
        else:
            checkpoint = load(path)
        # What is left is what Lightning's hooks get on the CPU.
        self._exact_state, self._loaded_from = checkpoint.pop(EXACT_STATE, None), path
        self._gradients = (self._exact_state or {}).pop(GRADIENTS, {})
        return checkpoint

    def take_exact_state(self) -> dict[str, Any] | None:
        """The exact state in the checkpoint that was loaded last, once; None if there is none."""
        state, self._exact_state = self._exact_state, None
        return state

    def load_weights(self, checkpoint: Mapping[str, Any], load: Callable[[Any, bool], None], *, strict: bool) -> None:
        """Loads a checkpoint's weights into the module.

        Args:
            checkpoint: as `load` returned it.
            load: the parent class's method, for a checkpoint in one file.
            strict: as for `load_state_dict`.
        """
        if sharded.FOLDER in checkpoint:
            sharded.load_weights(checkpoint, self._module, strict=strict)
            return
        # One execution, not one for each weight.
        with uploading():
            load(checkpoint, strict)
        get_runtime().tracing.flush()

    def load_optimizers(self, run: Run | None, checkpoint: Mapping[str, Any], load: Callable[[Any], None]) -> None:
        """Loads a checkpoint's optimizer states, and gradients if it was saved in an accumulation.

        Args:
            run: the run under way; without one, accumulated gradients are left out.
            checkpoint: as `load` returned it.
            load: the parent class's method, for a checkpoint in one file.
        """
        if sharded.FOLDER in checkpoint:
            sharded.load_optimizers(checkpoint, self._module, self._strategy.optimizers)
            put_back = functools.partial(sharded.load_accumulated, checkpoint, self._module)
        else:
            with uploading():
                load(checkpoint)
            gradients, self._gradients = self._gradients, {}
            put_back = functools.partial(load_gradients, self._module, gradients)
        if run is not None:
            run.resumes_gradients(put_back)
            show_differences(self._loaded_from, self._settings(), self._sharding)


class XLAEagerStrategy(StrategyHooks, RankHooks, SingleDeviceXLAStrategy):  # type: ignore[misc]
    """Trains a LightningModule on the PJRT device of the process.

    Everything runs eagerly, except steps: each training, validation, test or predict step is compiled as one graph and
    executed once. Reading a tensor, saving a checkpoint or a sync inside a step raises, with the line. A step that
    fails or is interrupted is discarded: weights, gradients and optimizer state are as before it.

        L.Trainer(strategy=XLAEagerStrategy()).fit(module, data)
        L.Trainer(strategy="xla_eager", precision="bf16-mixed").fit(module, data)

    The methods are Lightning's hooks. What they do is in `run.Run`, which lasts from setup to teardown, in
    `checkpoints.trainer.TrainerCheckpoints` and in `connector.plugins.TrainerPlugins`.

    Args:
        config: the XLA options as a whole, instead of single ones.
        precision: `"32-true"`, `"bf16-true"` or `"bf16-mixed"`; the Trainer's `precision=` does the same.
        auto_sharding: shards the model over all devices of the process, with the plan that is estimated to cost least.
            A batch of the loader is for all devices together. Without this or `sharding` one device trains.
        sharding: how to shard, by name (`"dp"`, `"fsdp"`, `"tp"`, `"2d"`, `"auto"`) or as a `ShardingConfig`, instead
            of `auto_sharding`.
        checkpoint_io: writes and reads checkpoints; it gets them with all tensors on the host.
        checkpoint: when else to save checkpoints and how, as a `CheckpointConfig` or its options: in the background,
            before the process is ended, after a time, with a deadline for steps and saves that hang.
        xla_report: records where the time of a fit goes and writes it to the Trainer's folder; `"log"` also logs it to
            the Trainer's loggers, as `xla/...`; False does none of it.
        shapes: gives batches few shapes, as a `ShapePolicy`, its options, or `"auto"`: lengths are padded to those of
            buckets, and a training's batches are formed within these. None leaves batches as they are.
        options: the options of `XLAConfig` one by one, instead of `config`.

    Raises:
        ConfigError: an option is not valid, or given twice.
        UnsupportedOptionError: an option cannot work on XLA.
        RuntimeOrderError: the XLA runtime was started earlier in a mode that does not fit.
    """

    _plugins: TrainerPlugins

    def __init__(
        self,
        config: XLAConfig | None = None,
        *,
        precision: XLAPrecisionFlag | None = None,
        auto_sharding: AutoShardingOption = None,
        sharding: ShardingOption = None,
        checkpoint_io: CheckpointIO | None = None,
        checkpoint: CheckpointConfig | dict[str, Any] | None = None,
        xla_report: bool | Literal["log"] = True,
        shapes: ShapePolicy | Mapping[str, Any] | str | None = None,
        **options: Unpack[XLAOptions],
    ) -> None:
        self.checkpoint_config = CheckpointConfig.resolve(checkpoint)
        self.xla_config = XLAConfig.resolve(config, options)
        name = type(self).__name__
        self._plugins = TrainerPlugins(name, precision)
        made = make_sharding(name, self.xla_config, auto_sharding=auto_sharding, sharding=sharding, shapes=shapes)
        self._sharding, self._ranks, self._ranks_config = made
        saves_shards = self._sharding is not None and self._sharding.saves_shards
        check_options(name, self.checkpoint_config, sharded=saves_shards)
        start_runtime(name, self.xla_config, shards=self._sharding is not None, ranks=self._ranks is not None)
        self._runtime = get_runtime()
        if self.xla_config.may_replay:
            # The self-test compiles. Do it now, and not during a run.
            _ = self._runtime.replay_works
        self._run: Run | None = None
        self._report = FitReport(xla_report)
        self._shapes = LoaderShapes(ShapePolicy.resolve(shapes), base_seed)
        self._checkpoints = TrainerCheckpoints(self, self.xla_config, self.checkpoint_config, self._sharding)
        SingleDeviceStrategy.__init__(self, device=self._runtime.device.torch_device(), checkpoint_io=checkpoint_io)
        self._take_rank()
        self._plugins.set_plugins()

    # ---- what the Trainer asks for when it is constructed --------------------------------------

    @property
    def _precision_plugin(self) -> Precision | None:
        return self._plugins.precision_for_connector()

    @_precision_plugin.setter
    def _precision_plugin(self, plugin: Precision | None) -> None:
        self._plugins.set_precision(plugin)

    @property  # type: ignore[override]
    def precision_plugin(self) -> Precision:
        """One of Lightning's own plugins, for the precision in effect."""
        return self._plugins.precision

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self._plugins.set_precision(plugin)

    # ---- a run ---------------------------------------------------------------------------------

    @property
    def run(self) -> Run:
        """The fit, validation, test or prediction under way."""
        if self._run is None:
            raise RuntimeError(f"{type(self).__name__}: no run is under way; the Trainer starts one")
        return self._run

    def xla_report(self) -> RunReport:
        """What the last fit did, or what this one has done so far: time, compiles, steps, rates."""
        return self._report.record.report()

    def preflight(
        self,
        trainer: Trainer,
        module: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        *,
        topology: str,
        timeout: float = 900,
        save_programs: str | os.PathLike[str] | None = None,
    ) -> PreflightReport:
        """Compiles the steps of a fit for TPUs that are not there: whether they fit, and what bounds them.

        The trainer is constructed once more in another process, with the first samples of the data and without the
        values of the parameters, and traced there; nothing is run. It gets a copy of the strategy, the accumulation and
        clipping, and the callbacks that are not Lightning's own.

        Args:
            trainer, module: as for the fit; the module may be on any device.
            train_dataloaders, val_dataloaders: one loader each; None where the module has its own.
            topology: generation, and chips along each dimension, as `"v5e:2x4"`.
            timeout: seconds for tracing, and for each compile.
            save_programs: a folder. The fit also runs for two updates on the CPU, and all that it compiles is compiled
                for the slice and saved there: a run on it with this folder as `cache_dir=` loads that.

        Returns:
            The report of all steps; `str()` gives it as text, and its `fits` says whether all of them fit.

        Raises:
            ConfigError: there is no such slice, or what traces with TorchTPU is not installed; or programs cannot be
                saved in the folder.
            UnsupportedOptionError: there are several loaders; or programs are to be saved of TorchTPU, or of several
                hosts.
        """
        from lightning_strategy.preflight import preflight

        sharded, loaders = self._sharding is not None, (train_dataloaders, val_dataloaders)
        found = preflight(
            self, trainer, module, *loaders, topology, sharded=sharded, timeout=timeout, save_programs=save_programs
        )
        self._report.record.preflight = found
        return found

    def setup_environment(self) -> None:
        """As `Strategy.setup_environment`; begins a run: eager mode and patches, until `teardown`."""
        check_plugin_saves(type(self).__name__, self.checkpoint_config, self.checkpoint_io)
        super().setup_environment()
        if self._run is None or self._run.end_if_left():
            assert self.lightning_module is not None
            self._shapes.begin()
            trainer = self.lightning_module.trainer
            config = config_of_run(trainer, self.xla_config)
            parts = self._sharding, self.checkpoint_config, self._report, self._shapes, self._ranks
            self._run = Run(trainer, config, *parts)
            self._run.begin()

    def setup(self, trainer: Trainer) -> None:
        """As `Strategy.setup`: moves the model to the device, and creates optimizers."""
        self.run.check()
        # Not the parent's: it sets and later deletes PT_XLA_DEBUG.
        Strategy.setup(self, trainer)
        self.run.model_is_ready(self._checkpoints.take_exact_state())

    def setup_optimizers(self, trainer: Trainer) -> None:
        """As `Strategy.setup_optimizers`.

        Raises:
            UnsupportedOptionError: an optimizer is a fused one.
        """
        with explaining_fused():
            super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            check_fused(optimizer)
            keep_own_kernels(optimizer)
            if self._ranks is not None:
                self._ranks.share_state(optimizer)

    def model_to_device(self) -> None:
        """As `Strategy.model_to_device`: tied weights stay tied, and under sharding the parameters are sharded."""
        assert self.model is not None
        if self._sharding is not None:
            accept_placements(self.model)
        if self._ranks is not None:
            self._prepare_ranks(self.model)
        with keeping_ties(self.model), uploading():
            self.model.to(self.root_device)
        if self._ranks is not None:
            self._ranks.prepare(self.model)
        if self._sharding is not None:
            assert self.lightning_module is not None
            prepare_for_run(self._sharding, self.lightning_module)
        self._runtime.tracing.flush()

    def teardown(self) -> None:
        """As `Strategy.teardown`; ends the run: no pending step, the model on the host, no patch."""
        with ExitStack() as stack:
            if self._run is not None:
                stack.callback(self._end_run)
                self._run.before_teardown()
            with optimizers_following(self.lightning_module, self.optimizers), keeping_ties(self.lightning_module):
                if self._sharding is not None:
                    bring_to_host(self.lightning_module, self.optimizers)
                if self._ranks is not None and self.model is not None and not self._has_failed:
                    self._ranks.join(self.model, self.optimizers)
                # Not the parent's: see `setup`.
                SingleDeviceStrategy.teardown(self)

    def __getstate__(self) -> dict[str, Any]:
        """As `Strategy.__getstate__`; no run is under way in a copy."""
        state: dict[str, Any] = super().__getstate__()
        return {**state, "_run": None, "_report": FitReport(self._report.wanted)}

    def _end_run(self) -> None:
        run, self._run = self.run, None
        run.end()

    def on_exception(self, exception: BaseException) -> None:
        """As `Strategy.on_exception`; discards the step under way."""
        if self._run is not None:
            self._run.steps.abort()
            self._report.record.failed(exception)
        if self._ranks is not None:
            self._has_failed = True
            self._ranks.ranks.failed(exception)
        hide_own_frames(exception)
        super().on_exception(exception)

    # ---- training ------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: Any) -> Any:
        """As `Strategy.process_dataloader`; with `shapes`, batches of a training are formed within buckets."""
        return super().process_dataloader(self._shapes.loader(dataloader))

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """As `Strategy.batch_to_device`: copies cost no execution, transforms on the device one per batch."""
        if self._run is not None:
            self._run.before_upload()
            batch = self._run.batches.shaped(batch)
        with uploading():
            batch = super().batch_to_device(batch, device, dataloader_idx)
        if self._sharding is not None:
            self._sharding.place_batch(batch)
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """As `Strategy.on_train_batch_start`; opens the training step."""
        self._report.batch_begins()
        self.run.batches.begin(batch, batch_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `Strategy.training_step`."""
        with nullcontext() if self._run is None else self._run.steps.computing():
            return super().training_step(*args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """As `Strategy.optimizer_step`; under automatic optimization the training step ends after the update."""
        if self._run is None:
            # Called by the user after a fit, through a `LightningOptimizer`.
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        with self.run.batches.update(closure), as_if_compiling(False):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    # ---- evaluation ----------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        """As `Strategy.on_validation_start`; counts batches from 0."""
        self._report.evaluation_begins()
        if self._ranks is not None:
            # All validate, or it is an error.
            self._ranks.ranks.wait("a validation")
        self.run.steps.begin_evaluation()

    def on_validation_end(self) -> None:
        """As `Strategy.on_validation_end`."""
        super().on_validation_end()
        self._report.evaluation_ended()
        self.run.watch_loading()

    def on_test_start(self) -> None:
        """As `Strategy.on_test_start`; counts batches from 0."""
        self.run.steps.begin_evaluation()

    def on_predict_start(self) -> None:
        """As `Strategy.on_predict_start`; counts batches from 0."""
        self.run.steps.begin_evaluation()

    def _results(self, step: StepProgram, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        results = method(*args, **kwargs)
        if not step.is_open or self.model is None:
            return results
        state = (*self.model.parameters(), *self.model.buffers())
        return copies(results, of_others_than=(*state, *tensors_in((args, kwargs))))

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `Strategy.validation_step`: one graph under `compile_eval`."""
        with self.run.batches.evaluation_step("validation_step", args) as step:
            return step.outputs(self._results, step, super().validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `Strategy.test_step`: one graph under `compile_eval`."""
        with self.run.batches.evaluation_step("test_step", args) as step:
            return step.outputs(self._results, step, super().test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `Strategy.predict_step`: one graph under `compile_eval`."""
        with self.run.batches.evaluation_step("predict_step", args) as step:
            return step.outputs(self._results, step, super().predict_step, args, kwargs)

    # ---- checkpoints ---------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """As `Strategy.lightning_module_state_dict`; of shards the first rank alone gets the whole values."""
        with for_first_rank():
            return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """As `Strategy.optimizer_state`; of shards the first rank alone gets the whole values."""
        with for_first_rank():
            return super().optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """As `Strategy.save_checkpoint`: a copy on the host, with random numbers and accumulated gradients.

        Raises:
            CheckpointSaveError: called inside a step.
        """
        write = functools.partial(super().save_checkpoint, storage_options=storage_options)
        with self._report.record.saving(checkpoint.get("global_step", 0), str(filepath)):
            self._checkpoints.save(self._run, checkpoint, filepath, write)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """As `Strategy.load_checkpoint`; a fit that looks for the last one resumes from the newest that is valid.

        Raises:
            CheckpointDamagedError: it is not what was written, and was asked for by its path (or none is valid).
        """
        # Lightning 2.5 knows no such argument.
        said: dict[str, Any] = {} if weights_only is None else {"weights_only": weights_only}
        read: Callable[[Any], dict[str, Any]] = functools.partial(super().load_checkpoint, **said)
        return self._checkpoints.load(self._run, checkpoint_path, read, weights_only=weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """As `Strategy.load_model_state_dict`; on the device it is one execution, not one per weight."""
        self._checkpoints.load_weights(checkpoint, super().load_model_state_dict, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """As `Strategy.load_optimizer_state_dict`; accumulated gradients are loaded, too."""
        self._checkpoints.load_optimizers(self._run, checkpoint, super().load_optimizer_state_dict)


# `L.Trainer(strategy="xla_eager")`.
if XLAEagerStrategy.strategy_name not in StrategyRegistry:
    XLAEagerStrategy.register_strategies(StrategyRegistry)
