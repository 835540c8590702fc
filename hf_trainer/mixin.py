"""`XLATrainerMixin`: makes any trainer derived from transformers' Trainer run its steps through the core."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import TrainingArguments

from hf_trainer.bridge import Bridge
from hf_trainer.libraries import before_log
from hf_trainer.model import OptimizerChoice, bfloat16_autocast, prepare_for_xla
from hf_trainer.options import (
    TrainerOptions,
    XLAArguments,
    check_arguments,
    check_optimizer,
    naming_near_options,
    take_fsdp,
    take_options,
)
from hf_trainer.patches import correct_process_index, give_device_to_accelerate, trainer_patches
from hf_trainer.resume import keeping_numbers_of_data, numbers_of_another_device_allowed
from xla_adapters import XLAConfig
from xla_adapters.checkpoint import CheckpointConfig, naming_failed_writes
from xla_adapters.data.shapes import ShapePolicy
from xla_adapters.insight.run_record import RunStats
from xla_adapters.insight.run_report import RunReport
from xla_adapters.insight.times import EVALUATION, INPUT, STEP
from xla_adapters.runtime import eager
from xla_adapters.sharding import ShardingConfig, ShardingPlan
from xla_adapters.utils.unpickling import only_values

if TYPE_CHECKING:
    _Base = transformers.Trainer
else:
    _Base = object


class XLATrainerMixin(_Base):
    """Makes a class derived from `transformers.Trainer` train on XLA devices. Name it first:

        class MyTrainer(XLATrainerMixin, SomebodysTrainer): ...

    Its methods are hooks that transformers calls. Each passes the call on to a part of the `Bridge`, which has the
    logic and the state, or to the next class.

    Args:
        args: positional arguments, as for the class it is mixed into.
        kwargs: keyword arguments, likewise; and the options of `XLAConfig` one by one, instead of `xla_args`.
        xla_args: the XLA options as a whole, as `XLAArguments` or `XLAConfig`.
        auto_sharding: shards the model over all devices by the plan with the lowest estimated cost. The batch sizes of
            `TrainingArguments` are those of all devices together (as in transformers under SPMD).
        sharding: how to shard, by name (`"dp"`, `"fsdp"`, `"tp"`, `"2d"`, `"auto"`) or as a `ShardingConfig`, instead
            of `auto_sharding`. Either needs `xla_adapters.initialize(spmd=True)` before `TrainingArguments` are made.
        safe_checkpoints: checkpoints are committed by a `CheckpointStore` and verified when a run resumes. This is
            the default; False leaves both to transformers, as several processes always do.
        checkpoint: when else to save checkpoints and how, as a `CheckpointConfig` or its options: in the background,
            before the process is ended, after a time, with a deadline for steps that hang.
        xla_report: records where the time of a training goes, logs it and writes it to `output_dir`. This is the
            default; False does none of it.
        shapes: gives batches few shapes, as a `ShapePolicy`, its options, or `"auto"`: lengths are padded to those of
            buckets, batches are formed within these, and a smaller last batch is filled up where that changes no
            number. None leaves batches as they are.

    Raises:
        ConfigError: an XLA option is not valid, or given twice.
        UnsupportedOptionError: a training argument cannot work on XLA.
    """

    def __init__(
        self,
        *args: Any,
        xla_args: XLAArguments | XLAConfig | None = None,
        auto_sharding: bool | Mapping[str, Any] | None = None,
        sharding: str | Mapping[str, Any] | ShardingConfig | None = None,
        safe_checkpoints: bool | None = None,
        checkpoint: CheckpointConfig | Mapping[str, Any] | None = None,
        xla_report: bool | None = None,
        shapes: str | Mapping[str, Any] | ShapePolicy | None = None,
        **kwargs: Any,
    ) -> None:
        options = TrainerOptions.resolve(
            xla_args,
            take_options(kwargs),
            auto_sharding=auto_sharding,
            sharding=sharding,
            safe_checkpoints=safe_checkpoints,
            checkpoint=checkpoint,
            xla_report=xla_report,
            shapes=shapes,
        )
        args, kwargs, options = take_fsdp(args, kwargs, options)
        self._xla = Bridge(self, super(), options)
        for given in (*args, kwargs.get("args")):
            # Not always the second one: TRL's DPO has a reference before it.
            if isinstance(given, TrainingArguments):
                check_arguments(given, self.xla_config)
        check_optimizer((kwargs.get("optimizers") or (None, None))[0], kwargs.get("optimizer_cls_and_kwargs"))
        with trainer_patches(), naming_near_options(kwargs):
            super().__init__(*args, **kwargs)
        self._xla.connect()

    @property
    def xla_config(self) -> XLAConfig:
        """How steps are run."""
        return self._xla.options.config

    @property
    def sharding_config(self) -> ShardingConfig | None:
        """How the model is sharded; None on one device."""
        return self._xla.options.sharding

    @property
    def safe_checkpoints(self) -> bool:
        """Whether checkpoints are committed and verified by a `CheckpointStore`."""
        return self._xla.options.safe_checkpoints

    @property
    def checkpoint_config(self) -> CheckpointConfig:
        """When else checkpoints are saved, and how."""
        return self._xla.options.checkpoint

    @property
    def run_stats(self) -> RunStats:
        """Compiles, executions and throughput of the last training."""
        return self._xla.run_stats

    @property
    def sharding_plan(self) -> ShardingPlan:
        """How the model is sharded.

        Raises:
            ConfigError: it is not, or no run has begun yet.
        """
        return self._xla.sharding.plan

    def xla_report(self) -> RunReport:
        """What the last training did, or what this one has done so far: time, compiles, steps, rates."""
        return self._xla.record.report()

    # ---- runs ------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`. A checkpoint to resume from is verified first.

        Raises:
            SystemExit: a signal asked for the end, under `save_on="preemption"`; a checkpoint was saved before.
        """
        with self._xla.training_run(resume_from_checkpoint) as checkpoint:
            if checkpoint is None and not args:
                # An override need not have the argument.
                return super().train(**kwargs)
            return super().train(checkpoint, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As `Trainer.evaluate`."""
        with self._xla.record.clock.during(EVALUATION), self._xla.session.running():
            metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        return metrics

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.predict`."""
        with self._xla.record.clock.during(EVALUATION), self._xla.session.running():
            return super().predict(*args, **kwargs)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self._xla.training_loop():
            return super()._inner_training_loop(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.evaluation_loop`. The results of each batch come to the host in one transfer."""
        return self._xla.evaluation.loop(*args, **kwargs)

    # ---- preparation -----------------------------------------------------------------------------

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        correct_process_index(self.args)
        give_device_to_accelerate(self.args)
        # For bf16 accelerate would set XLA_USE_BF16 in the environment: too late to take effect, or for the whole
        # process. `compute_loss_context_manager` does what bf16=True means.
        return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}

    def compute_loss_context_manager(self) -> ExitStack:
        """As `Trainer.compute_loss_context_manager`, with bfloat16 autocast under `bf16=True`."""
        stack = super().compute_loss_context_manager()
        if self.args.bf16:
            stack.enter_context(bfloat16_autocast(self))
        return stack

    get_optimizer_cls_and_kwargs: Any = OptimizerChoice()

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)  # type: ignore[no-untyped-call]
        prepare_for_xla(self, self.xla_config)
        return prepared

    def set_initial_training_values(self, args: TrainingArguments, dataloader: Any) -> Any:
        """As `Trainer.set_initial_training_values`, by the samples that the checkpoint to resume from has seen."""
        return self._xla.resumed.initial_values(self._xla.checkpoints.resumed_from, args, dataloader)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        return self._xla.resumed.training_state(*args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """As `Trainer.get_train_dataloader`."""
        return self._xla.shapes.loader(super().get_train_dataloader)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        dataset = next(iter((*args, *kwargs.values())), None)
        stock = super()._get_train_sampler(*args, **kwargs)
        return self._xla.shapes.sampler(self.train_dataset if dataset is None else dataset, stock)

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        self._xla.sharding.accept_dtensors(model)
        self._xla.moves.note(model)
        # In eager mode the move would compile a program for each shape.
        with eager(False):
            super()._move_model_to_device(model, device)

    def _validate_args(self) -> None:
        # transformers refuses an optimizer whose parameters are on another device than the model.
        if self.model is not None:
            self._xla.moves.follow(self.model, self.optimizer)
        super()._validate_args()

    # ---- the training step -----------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """As `Trainer.get_batch_samples`. The loop calls it at the begin of each optimizer step."""
        self._xla.watch.begin(f"step {self.state.global_step + 1}")
        self._xla.training.new_update()
        with self._xla.record.clock.during(INPUT):
            num_batches = self._xla.resumed.batches_of_update(num_batches)
            return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        return self._xla.inputs.item_count(batch_samples, device)

    def _prepare_input(self, data: Any) -> Any:
        return self._xla.inputs.prepare(data)

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """As `Trainer.training_step`. Opens the compiled step; it is closed when the optimizer has stepped.

        Outside of `train()` nothing would close it, so there it runs operation by operation.
        """
        if not self.is_in_train:
            with self._xla.session.running():
                return super().training_step(model, inputs, num_items_in_batch)
        # Until the callbacks of its end.
        self._xla.record.clock.switch(STEP)
        return self._xla.training.step(model, inputs, num_items_in_batch)

    def floating_point_ops(self, inputs: dict[str, Any]) -> Any:
        """As `Trainer.floating_point_ops`."""
        return self._xla.training.value("floating point operations", super().floating_point_ops, inputs)

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        return self._xla.training.value("clipped norm", super()._clip_grad_norm, model)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        norm: Any = super()._get_grad_norm
        return (
            norm(model, grad_norm=grad_norm) if grad_norm is not None else self._xla.training.value("norm", norm, model)
        )

    def _track_num_input_tokens(self, inputs: Mapping[str, Any]) -> None:
        self._xla.training.track_tokens(inputs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As `Trainer.log`; under `report_to`, those of the training also say what its time goes to."""
        self._xla.add_to(logs)
        before_log(self)
        super().log(logs, *args, **kwargs)

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, model: Any, trial: Any, *args: Any, **kwargs: Any
    ) -> None:
        self._xla.checkpoints.save_before_evaluation(model, trial)
        self._xla.training.log(tr_loss, grad_norm, model, trial, *args, **kwargs)
        self._xla.checkpoints.end_if_asked(model, trial)

    # ---- the evaluation step ---------------------------------------------------------------------

    def prediction_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """As `Trainer.prediction_step`, compiled as one graph under `compile_eval`."""
        with self._xla.watch.watching("a step of the evaluation"):
            return self._xla.evaluation.step(model, inputs, prediction_loss_only, *args, **kwargs)

    # ---- checkpoints -----------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        return self._xla.checkpoints.output_dir(trial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with self._xla.saving():
            self._xla.checkpoints.save(model, trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As `Trainer.save_model`. Waits for a checkpoint that is being written.

        Raises:
            CheckpointWriteError: a file could not be written.
        """
        if _internal_call:
            self._xla.sharded_checkpoints.save_model(output_dir, _internal_call)
            return
        self._xla.checkpoints.finish_pending()
        with naming_failed_writes("the model", str(output_dir or self.args.output_dir)):
            self._xla.sharded_checkpoints.save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._xla.sharded_checkpoints.save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self._xla.sharded_checkpoints.load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with keeping_numbers_of_data(self), only_values(checkpoint), numbers_of_another_device_allowed(checkpoint):
            super()._load_rng_state(checkpoint)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self._xla.checkpoints.push(checkpoint_folder)

    def _finalize_training(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
        self._xla.checkpoints.finish(trial)
        return super()._finalize_training(trial, *args, **kwargs)  # type: ignore[no-untyped-call]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        with self._xla.weights.loading(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _load_best_model(self) -> None:
        self._xla.checkpoints.verify_best()
        with self._xla.weights.loading(self.state.best_model_checkpoint):
            super()._load_best_model()
            self._xla.sharding.apply()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        self._xla.weights.after_load(load_result)
