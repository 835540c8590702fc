"""`XLATrainerMixin`: makes any trainer derived from transformers' Trainer run its steps through the core."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import find_batch_size
from transformers.training_args import OptimizerNames

from hf_trainer.arguments import XLAArguments, resolve_config
from hf_trainer.callbacks import FirstCallback, LastCallback, XLAStatsCallback
from hf_trainer.evaluation import to_host_in_one_transfer
from hf_trainer.framework_patches import as_if_compiling, trainer_patches
from hf_trainer.refusals import check_arguments, check_optimizer
from hf_trainer.step_driver import StepDriver
from hf_trainer.tokens import count_input_tokens
from hf_trainer.weights import load_renamed_weights
from xla_adapters import XLAConfig, get_backend
from xla_adapters.errors import UnsupportedOptionError
from xla_adapters.modes import eager, uploading
from xla_adapters.run_stats import RunStats

if TYPE_CHECKING:
    _Base = transformers.Trainer
else:
    _Base = object

logger = logging.getLogger("hf_trainer")


class XLATrainerMixin(_Base):
    """Put it before a class derived from `transformers.Trainer`.

        class MyTrainer(XLATrainerMixin, SomebodysTrainer): ...

    Args:
        *args, **kwargs: as for the class it is mixed into.
        xla_args: the XLA options as `XLAArguments` or `XLAConfig`, or singly:
        xla_mode, on_graph_break, compile_eval, max_graphs, free_grads, accumulation: see `XLAConfig`.

    Raises:
        ConfigError: an XLA option is not valid, or given twice.
        UnsupportedOptionError: a training argument cannot work on XLA.
    """

    def __init__(
        self,
        *args: Any,
        xla_args: XLAArguments | XLAConfig | None = None,
        xla_mode: str | None = None,
        on_graph_break: str | None = None,
        compile_eval: bool | None = None,
        max_graphs: int | None = None,
        free_grads: bool | str | None = None,
        accumulation: str | None = None,
        auto_sharding: bool | None = None,
        **kwargs: Any,
    ) -> None:
        self.xla_config = resolve_config(
            xla_args,
            {
                "xla_mode": xla_mode,
                "on_graph_break": on_graph_break,
                "compile_eval": compile_eval,
                "max_graphs": max_graphs,
                "free_grads": free_grads,
                "accumulation": accumulation,
                "auto_sharding": auto_sharding,
            },
        )
        self._backend = get_backend()
        self._backend.initialize()
        given = kwargs.get("args", args[1] if len(args) > 1 else None)
        if given is not None:
            check_arguments(given, self.xla_config)
        check_optimizer((kwargs.get("optimizers") or (None, None))[0], kwargs.get("optimizer_cls_and_kwargs"))
        self._keep_inputs_on_host = False
        self._session_depth = 0
        self.run_stats = RunStats()
        self._queued_for_counting: list[Mapping[str, Any]] = []
        with trainer_patches():
            super().__init__(*args, **kwargs)
        self._steps = StepDriver(self.xla_config, self.args.seed)
        self._last_callback = LastCallback(self)
        self.callback_handler.callbacks.insert(0, FirstCallback(self))

    # ---- a run -----------------------------------------------------------------------------------

    @contextmanager
    def _session(self) -> Iterator[None]:
        """The patches and the eager mode that a run needs; nests, and undoes itself."""
        if self._session_depth:
            yield
            return
        self._session_depth += 1
        with ExitStack() as stack:
            stack.enter_context(trainer_patches())
            stack.enter_context(eager(self.xla_config.eager_by_default))
            if self.xla_config.xla_mode == "eager+dynamo":
                stack.enter_context(self._dynamo())
            try:
                yield
            finally:
                self._session_depth -= 1
                self._steps.abort()

    @contextmanager
    def _dynamo(self) -> Iterator[None]:
        self.model.compile(backend=self._backend.dynamo_backend)
        try:
            yield
        finally:
            self.model._compiled_call_impl = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`."""
        # Callbacks added since the construction stand before the last one again.
        callbacks = self.callback_handler.callbacks
        if self._last_callback in callbacks:
            callbacks.remove(self._last_callback)
        callbacks.append(self._last_callback)
        for callback in callbacks:
            if isinstance(callback, XLAStatsCallback):
                callback.stats = self.run_stats
        with self._session():
            self.run_stats.start()
            try:
                return super().train(*args, **kwargs)
            finally:
                self.run_stats.stop()

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As `Trainer.evaluate`."""
        with self._session():
            metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        return metrics

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.predict`."""
        with self._session():
            return super().predict(*args, **kwargs)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._inner_training_loop(*args, **kwargs)
        except BaseException as error:
            translated = self._steps.translate(error)
            self._steps.abort()
            if translated is not None:
                raise translated from error
            raise

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        # accelerate would set XLA_USE_BF16 in the environment: too late to take effect, or for the
        # whole process. The step's own autocast does what bf16=True means.
        arguments = super()._build_accelerator_args(**kwargs)
        arguments["mixed_precision"] = "no"
        return arguments

    def compute_loss_context_manager(self) -> ExitStack:
        """As `Trainer.compute_loss_context_manager`, with bfloat16 autocast under `bf16=True`."""
        stack = super().compute_loss_context_manager()
        if self.args.bf16:
            stack.enter_context(torch.autocast(self.args.device.type, dtype=torch.bfloat16))
        return stack

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        check_optimizer(_innermost(self.optimizer), None)
        if self.args.activation_checkpointing:
            self._use_xla_checkpointing()
        if self.xla_config.eager_by_default and self._backend.pending_count():
            # Moving the model was traced (integer buffers are converted there): not the first step's work.
            self._backend.flush()
        return prepared

    def _use_xla_checkpointing(self) -> None:
        """torch's checkpoint needs a `torch.xla` module, and XLA would undo the recomputation."""
        options = dict(self.args.activation_checkpointing_kwargs or {})
        options.pop("every_n_layers", None)
        options.pop("use_reentrant", None)
        if options.pop("offload", False):
            raise UnsupportedOptionError(
                "activation_checkpointing_kwargs={'offload': True}: activations cannot move to the host inside one "
                "XLA graph; leave offload off (recomputation alone already frees them)"
            )
        for module in self.model.modules():
            if hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = partial(self._backend.checkpoint, **options)

    # ---- checkpoints -----------------------------------------------------------------------------

    _loading_from: str | None = None

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._loading_from = resume_from_checkpoint
        try:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        finally:
            self._loading_from = None

    def _load_best_model(self) -> None:
        self._loading_from = self.state.best_model_checkpoint
        try:
            super()._load_best_model()
        finally:
            self._loading_from = None

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        if load_result.unexpected_keys and self._loading_from and isinstance(self.model, transformers.PreTrainedModel):
            load_renamed_weights(self.model, self._loading_from)
            return
        super()._issue_warnings_after_load(load_result)

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: Any = None) -> tuple[Any, dict[str, Any]]:
        """As `Trainer.get_optimizer_cls_and_kwargs`; the default, fused AdamW, becomes plain AdamW."""
        if args.optim == OptimizerNames.ADAMW_TORCH_FUSED:
            args = copy.copy(args)
            args.optim = OptimizerNames.ADAMW_TORCH
        return transformers.Trainer.get_optimizer_cls_and_kwargs(args, model)

    # ---- the step --------------------------------------------------------------------------------

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.get_batch_samples`; it is where the loop begins an optimizer step."""
        self._steps.new_update()
        return super().get_batch_samples(*args, **kwargs)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        # Counted where the labels are; the step takes the count to the device.
        on_host = batch_samples and not any(
            isinstance(value, torch.Tensor) and value.device.type == "xla" for value in _values(batch_samples[0])
        )
        if on_host and self.args.world_size == 1:
            device = torch.device("cpu")
        return super()._get_num_items_in_batch(batch_samples, device)

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """As `Trainer.training_step`; opens the step that `on_optimizer_step` closes."""
        if self._tr_loss.ndim == 0:
            self._tr_loss = self._zero_loss()
        self.run_stats.count_batch(samples=find_batch_size(inputs) or 0, tokens=_token_count(inputs))
        self._steps.begin_micro_step(
            inputs,
            step=self.state.global_step,
            updates=self.accelerator.gradient_state.sync_gradients,
            training=model.training,
        )
        with self._steps.around_micro_step(), as_if_compiling():
            if isinstance(num_items_in_batch, torch.Tensor):
                with uploading():
                    num_items_in_batch = num_items_in_batch.to(self.args.device)
            return super().training_step(model, inputs, num_items_in_batch)

    def _prepare_input(self, data: Any) -> Any:
        if self._keep_inputs_on_host:
            return data
        with uploading():
            return super()._prepare_input(data)

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        self._steps.begin_optimizer(self.state.global_step)
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        self._steps.begin_optimizer(self.state.global_step)
        return super()._get_grad_norm(model, grad_norm=grad_norm)

    def close_update(self) -> None:
        """The optimizer has stepped: the step ends (called by the first callback)."""
        self.run_stats.count_step()
        self._steps.end_update(self.model, free_grads=self._frees_grads())
        self._count_queued_tokens()

    def close_substep(self) -> None:
        """A micro batch without an update has ended (called by the first callback)."""
        self._steps.end_substep()
        self._count_queued_tokens()

    def drop_open_step(self) -> None:
        """The loop stops in the middle of an accumulation (called by the last callback)."""
        self._steps.abort()

    def _frees_grads(self) -> bool:
        if self.xla_config.free_grads != "auto":
            return bool(self.xla_config.free_grads)
        return not any(
            getattr(callback.on_optimizer_step, "__func__", None) is not TrainerCallback.on_optimizer_step
            for callback in self.callback_handler.callbacks
            if not isinstance(callback, FirstCallback)
        )

    # ---- reads, kept out of the step and made few ------------------------------------------------

    def _track_num_input_tokens(self, inputs: Mapping[str, Any]) -> None:
        if self.args.include_num_input_tokens_seen == "no":
            return
        if self.args.world_size == 1:
            self.state.num_input_tokens_seen += count_input_tokens(
                inputs, self.model, self.processing_class, self.args.include_num_input_tokens_seen
            )
        else:
            self._queued_for_counting.append(inputs)
            if not self._steps.is_open:
                self._count_queued_tokens()

    def _count_queued_tokens(self) -> None:
        queued, self._queued_for_counting = self._queued_for_counting, []
        for inputs in queued:
            super()._track_num_input_tokens(inputs)

    def _maybe_log_save_evaluate(
        self, tr_loss: torch.Tensor, grad_norm: torch.Tensor | float | None, *args: Any, **kwargs: Any
    ) -> None:
        logs = self.control.should_log and self.state.global_step > self._globalstep_last_logged
        if not logs or self.args.world_size > 1:
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)
            return
        if isinstance(grad_norm, torch.Tensor):
            tr_loss, grad_norm = self._backend.to_host([tr_loss, grad_norm])
        else:
            (tr_loss,) = self._backend.to_host([tr_loss])
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)
        # The base class sets the loss it was given to zero; that was the copy.
        self._tr_loss = self._zero_loss()

    def _zero_loss(self) -> torch.Tensor:
        # Of shape (1,), not (): torch_xla shares uploaded scalars between tensors and so never donates
        # their buffer, which would make the step after each log another graph.
        with uploading():
            return torch.zeros(1).to(self.args.device)

    # ---- evaluation ------------------------------------------------------------------------------

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.evaluation_loop`; the results of each batch come to the host in one transfer."""
        preprocess = self.preprocess_logits_for_metrics
        if self.args.world_size == 1:
            # It runs on the device, inside the evaluation step, and not again in the loop.
            self._preprocess_in_step = preprocess
            self.preprocess_logits_for_metrics = None
            self._keep_inputs_on_host = True
        try:
            with self._session():
                return super().evaluation_loop(*args, **kwargs)
        finally:
            self._preprocess_in_step = None
            self._keep_inputs_on_host = False
            self.preprocess_logits_for_metrics = preprocess

    _preprocess_in_step: Any = None

    def prediction_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """As `Trainer.prediction_step`, compiled as one graph under `compile_eval`."""
        compiled = self.xla_config.compiles_step and self.xla_config.compile_eval
        keeps_on_host, self._keep_inputs_on_host = self._keep_inputs_on_host, False
        if compiled:
            phase = "evaluation, loss only" if prediction_loss_only else "evaluation"
            self._steps.begin_evaluation_step(inputs, phase)
        try:
            with as_if_compiling():
                loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)
                if self._preprocess_in_step is not None and logits is not None:
                    logits = self._preprocess_in_step(logits, labels)
        except BaseException as error:
            translated = self._steps.translate(error)
            self._steps.abort()
            if translated is not None:
                raise translated from error
            raise
        finally:
            self._keep_inputs_on_host = keeps_on_host
        if compiled:
            self._steps.evaluation.close()
        if self.args.world_size > 1:
            return loss, logits, labels
        results: tuple[Any, Any, Any] = to_host_in_one_transfer((loss, logits, labels))
        return results


def _values(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        yield from batch.values()
    elif isinstance(batch, (list, tuple)):
        yield from batch


def _token_count(inputs: Mapping[str, Any]) -> int:
    ids = inputs.get("input_ids")
    return int(ids.numel()) if isinstance(ids, torch.Tensor) else 0


def _innermost(optimizer: Any) -> torch.optim.Optimizer | None:
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer  # type: ignore[no-any-return]
