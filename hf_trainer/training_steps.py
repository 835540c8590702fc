"""`TrainingSteps`: the training step, from the batch to the update, as one compiled step."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
import transformers
from transformers import TrainerCallback
from transformers.trainer_pt_utils import find_batch_size

from hf_trainer.framework_patches import as_if_compiling
from hf_trainer.inputs import Inputs
from hf_trainer.libraries import generates_batches, generating, generating_apart, prepared
from hf_trainer.loss_check import checked_loss
from hf_trainer.loss_sum import LossSum
from hf_trainer.placement import model_of
from hf_trainer.replay import ReplayedLoss, call_spec, obstacle_around, obstacle_within
from hf_trainer.step_driver import StepDriver
from hf_trainer.user_code import StepCode
from xla_adapters import XLAConfig
from xla_adapters.data.batches import token_count
from xla_adapters.insight.run_record import RunStats
from xla_adapters.replay.call_spec import CallSpec


class TrainingSteps:
    """Runs the methods that the training loop calls between two batches inside the steps of a `StepDriver`.

    In a replayed step the methods of the base class are not called: the executable does their work.

    Args:
        trainer: the trainer.
        base: the methods that the mixin overrides.
        steps: opens and closes the steps.
        inputs: moves batches to the device.
        loss_sum: the sum that each step adds its loss to.
        stats: counts steps, samples and tokens.
    """

    def __init__(
        self,
        trainer: transformers.Trainer,
        base: Any,
        steps: StepDriver,
        inputs: Inputs,
        loss_sum: LossSum,
        stats: RunStats,
    ) -> None:
        self._trainer = trainer
        self._base = base
        self._steps = steps
        self._inputs = inputs
        self._loss_sum = loss_sum
        self._stats = stats
        self._code = StepCode(trainer, steps.config)

    @property
    def _config(self) -> XLAConfig:
        return self._steps.config

    # ---- what the loop calls ---------------------------------------------------------------------

    def step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None
    ) -> torch.Tensor:
        """As `Trainer.training_step`. Opens the step, which `end_update` closes."""
        trainer, steps = self._trainer, self._steps
        self._loss_sum.make_donatable()
        self._stats.count_batch(samples=find_batch_size(inputs) or 0, tokens=token_count(inputs))
        spec = None
        generated = generates_batches(trainer)
        if generated:
            # As the method of the base class does before it prepares the batch. An evaluation has changed the mode.
            model.train()
            with generating(trainer, model, steps.generation):
                inputs = trainer._prepare_inputs(inputs)
        if self._may_replay():
            # Before the step begins, because a replay does not call the base class's method.
            inputs = self._inputs.before_step(inputs)
            num_items_in_batch = self._inputs.item_count_on_device(num_items_in_batch)
            spec = self._call_spec(model, inputs, num_items_in_batch)
        steps.begin_micro_step(
            inputs,
            step=trainer.state.global_step,
            updates=trainer.accelerator.gradient_state.sync_gradients,
            replay=spec,
        )
        if steps.train.is_replaying:
            return ReplayedLoss(trainer._tr_loss.device)  # type: ignore[return-value]
        with ExitStack() as stack:
            stack.enter_context(steps.around_micro_step())
            stack.enter_context(as_if_compiling())
            stack.enter_context(checked_loss(trainer))
            stack.enter_context(generating_apart(trainer, steps))
            if generated:
                stack.enter_context(prepared(trainer))
            loss: torch.Tensor = self._base.training_step(
                model, inputs, self._inputs.item_count_on_device(num_items_in_batch)
            )
        steps.train.keep("loss", loss)
        return loss

    def floating_point_ops(self, inputs: dict[str, Any]) -> Any:
        """As `Trainer.floating_point_ops`, which walks over all parameters. Skipped in replayed steps."""
        train = self._steps.train
        if train.is_replaying:
            return train.promise("floating point operations")
        operations = self._base.floating_point_ops(inputs)
        train.keep("floating point operations", operations)
        return operations

    def clip_grad_norm(self, model: torch.nn.Module) -> Any:
        """As `Trainer._clip_grad_norm`."""
        train = self._steps.train
        if train.is_replaying:
            return train.promise("clipped norm")
        norm = self._base._clip_grad_norm(model)
        train.keep("clipped norm", norm)
        return norm

    def grad_norm(self, model: torch.nn.Module, grad_norm: Any) -> Any:
        """As `Trainer._get_grad_norm`."""
        train = self._steps.train
        if grad_norm is None and train.is_replaying:
            return train.promise("norm")
        grad_norm = self._base._get_grad_norm(model, grad_norm=grad_norm)
        train.keep("norm", grad_norm)
        return grad_norm

    def end_update(self) -> None:
        """The optimizer has stepped: closes the step, which executes it."""
        self._stats.count_step()
        self._steps.end_update(model_of(self._trainer), free_grads=self._frees_grads())

    # ---- replays ---------------------------------------------------------------------------------

    def _may_replay(self) -> bool:
        if not self._steps.may_replay:
            return False
        obstacle = obstacle_around(self._trainer)
        if obstacle is None and self._config.step_replay is not True:
            obstacle = obstacle_within(self._trainer)
        if obstacle is not None:
            self._steps.train.refuse_replay(obstacle)
        return obstacle is None

    def _call_spec(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any) -> CallSpec:
        trainer = self._trainer
        known = (
            self._steps.is_first_micro_step,
            trainer.current_gradient_accumulation_steps,
            trainer.loss_is_scaled_for_ga,
            id(trainer.optimizer),
            # Whether gradients outlive the step.
            self._frees_grads(),
        )
        return call_spec(trainer, model, (inputs, num_items_in_batch), self._code.present(), known=known)

    def _frees_grads(self) -> bool:
        """Whether the step frees its gradients: under "auto" if no callback could read them."""
        if self._config.free_grads != "auto":
            return bool(self._config.free_grads)
        return not any(
            getattr(callback.on_optimizer_step, "__func__", None) is not TrainerCallback.on_optimizer_step
            for callback in self._trainer.callback_handler.callbacks
        )
