"""Training hooks: the loop's events become the edges of steps, and its reads become few."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import transformers
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import find_batch_size
from transformers.training_args import OptimizerNames

from hf_trainer.callbacks import FirstCallback
from hf_trainer.framework_patches import as_if_compiling
from hf_trainer.own_code import StepCode, overridden
from hf_trainer.placement import own_scalars
from hf_trainer.refusals import check_optimizer
from hf_trainer.replay import ReplayedLoss, obstacle_around, obstacle_within, request_of
from hf_trainer.tokens import count_input_tokens
from hf_trainer.trainer_hooks import TrainerHooks
from xla_adapters.batches import token_count
from xla_adapters.errors import UnsupportedOptionError
from xla_adapters.nested_values import replaced
from xla_adapters.transfers import uploading


class TrainingHooks(TrainerHooks):
    """Everything between the batch and the next one."""

    # ---- preparation -----------------------------------------------------------------------------

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
        prepared = super()._prepare_for_training(*args, **kwargs)  # type: ignore[no-untyped-call]
        check_optimizer(_innermost(self.optimizer), None)
        if self.args.activation_checkpointing:
            self._use_xla_checkpointing()
        if self.xla_config.eager_by_default and self._backend.pending_count():
            # Moving the model was traced (integer buffers are converted there): not the first step's work.
            self._backend.flush()
        if self.model is not None:
            own_scalars(self.model)
        return prepared

    def _use_xla_checkpointing(self) -> None:
        """torch's checkpoint needs a `torch.xla` module, and XLA would undo the recomputation."""
        given: Any = self.args.activation_checkpointing_kwargs
        options = dict(given or {})
        options.pop("every_n_layers", None)
        options.pop("use_reentrant", None)
        if options.pop("offload", False):
            raise UnsupportedOptionError(
                "activation_checkpointing_kwargs={'offload': True}: activations cannot move to the host inside one "
                "XLA graph; leave offload off (recomputation alone already frees them)"
            )
        checkpoint: Any = partial(self._backend.checkpoint, **options)
        for module in self._live_model.modules():
            if hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = checkpoint

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: Any = None) -> tuple[Any, dict[str, Any]]:
        """As `Trainer.get_optimizer_cls_and_kwargs`; the default, fused AdamW, becomes plain AdamW.

        Raises:
            UnsupportedOptionError: the optimizer's package is not for XLA.
        """
        if args.optim == OptimizerNames.ADAMW_TORCH_FUSED:
            args = copy.copy(args)
            args.optim = OptimizerNames.ADAMW_TORCH
        cls, kwargs = transformers.Trainer.get_optimizer_cls_and_kwargs(args, model)
        check_optimizer(None, (cls, kwargs))
        if args.optim == OptimizerNames.STABLE_ADAMW:
            # By itself it asks triton for a GPU, on whatever device the parameters are.
            kwargs = {**kwargs, "triton": False}
        return cls, kwargs

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
        self.run_stats.count_batch(samples=find_batch_size(inputs) or 0, tokens=token_count(inputs))
        steps, training = self._steps, model.training
        replay = None
        if self._may_replay():
            # Before the step begins: a replay leaves out the base class's method.
            inputs, num_items_in_batch = self._found_by_step(inputs), self._on_device(num_items_in_batch)
            known = (
                steps.is_first_micro_step,
                self.current_gradient_accumulation_steps,
                self.loss_is_scaled_for_ga,
                id(self.optimizer),
                # Whether gradients outlive the step.
                self._frees_grads(),
            )
            if self._own_code is None:
                self._own_code = StepCode(self)
            replay = request_of(self, model, (inputs, num_items_in_batch), self._own_code.present(), known=known)
        steps.begin_micro_step(
            inputs,
            step=self.state.global_step,
            updates=self.accelerator.gradient_state.sync_gradients,
            training=training,
            replay=replay,
        )
        if steps.train.is_replaying:
            return ReplayedLoss(self._tr_loss.device)  # type: ignore[return-value]
        with steps.around_micro_step(), as_if_compiling():
            loss = super().training_step(model, inputs, self._on_device(num_items_in_batch))
        steps.train.keep("loss", loss)
        return loss

    def floating_point_ops(self, inputs: dict[str, Any]) -> Any:
        """As `Trainer.floating_point_ops`, which walks over all parameters; not again in replayed steps."""
        if self._steps.train.is_replaying:
            return self._steps.train.promise("floating point operations")
        operations = super().floating_point_ops(inputs)
        self._steps.train.keep("floating point operations", operations)
        return operations

    def _may_replay(self) -> bool:
        if not self._steps.may_replay:
            return False
        obstacle = obstacle_around(self)
        if obstacle is None and self.xla_config.step_replay is not True:
            obstacle = obstacle_within(self)
        if obstacle is not None:
            self._steps.train.refuse_replay(obstacle)
        return obstacle is None

    def _on_device(self, items: Any) -> Any:
        if not isinstance(items, torch.Tensor):
            return items
        with uploading():
            return items.to(self.args.device)

    def _prepare_input(self, data: Any) -> Any:
        if self._keep_inputs_on_host:
            return data
        with uploading():
            prepared = super()._prepare_input(data)
        if self._sharder is not None and isinstance(prepared, torch.Tensor):
            self._sharder.place_batch(prepared)
        return prepared

    def _found_by_step(self, inputs: Any) -> Any:
        """The batch on the device, before the step begins, which then prepares it."""
        if overridden(self, ("_prepare_inputs", "_prepare_input")) is None:
            return self._prepare_inputs(inputs)
        # What somebody's own method does with it is part of the step, and done only there.
        return replaced(inputs, lambda tensor: TrainingHooks._prepare_input(self, tensor))

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        self._steps.begin_optimizer(self.state.global_step)
        if self._steps.train.is_replaying:
            return self._steps.train.promise("clipped norm")
        norm = super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]
        self._steps.train.keep("clipped norm", norm)
        return norm

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        self._steps.begin_optimizer(self.state.global_step)
        if grad_norm is not None or not self._steps.train.is_replaying:
            grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[no-untyped-call]
            self._steps.train.keep("norm", grad_norm)
            return grad_norm
        return self._steps.train.promise("norm")

    def close_update(self) -> None:
        """The optimizer has stepped: the step ends (called by the first callback)."""
        self.run_stats.count_step()
        self._steps.end_update(self._live_model, free_grads=self._frees_grads())
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
                inputs, self.model, self.processing_class, str(self.args.include_num_input_tokens_seen)
            )
        else:
            self._queued_for_counting.append(inputs)
            if not self._steps.is_open:
                self._count_queued_tokens()

    def _count_queued_tokens(self) -> None:
        queued, self._queued_for_counting = self._queued_for_counting, []
        for inputs in queued:
            super()._track_num_input_tokens(inputs)  # type: ignore[no-untyped-call]

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


def _values(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        yield from batch.values()
    elif isinstance(batch, (list, tuple)):
        yield from batch


def _innermost(optimizer: Any) -> torch.optim.Optimizer | None:
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer  # type: ignore[no-any-return]
