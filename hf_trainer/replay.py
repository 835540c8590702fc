"""Replayed steps in HF's loops: which steps may be replayed, their `CallSpec`, and the loss that stands for theirs."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from accelerate import Accelerator
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._pytree import tree_flatten
from transformers import TrainerCallback
from transformers.trainer_pt_utils import LabelSmoother

from hf_trainer.user_code import key_of, overridden
from xla_adapters.replay.call_spec import CallSpec
from xla_adapters.replay.guards.batch import batch_obstacle
from xla_adapters.replay.tracked_code import TrackedCode
from xla_adapters.utils.nested_values import as_dicts

# Methods that the step consists of. A replay calls the first ones, whose override would surround the step with user
# code, and does not call the others.
_AROUND = ("training_step", "_clip_grad_norm", "_get_grad_norm", "floating_point_ops")
_WITHIN = (
    "compute_loss_context_manager",
    "autocast_smart_context_manager",
    "_prepare_inputs",
    "_prepare_input",
    "_prepare_context_parallel_inputs",
)
# Called inside the evaluation step.
_WITHIN_EVALUATION = (*_WITHIN, "_get_num_items_in_batch")
# Methods of accelerate that the step calls.
_OF_ACCELERATOR = ("backward", "clip_grad_norm_", "unwrap_model")
# After so many steps without a log, values are compared by a transfer of their own.
_PATIENCE = 4
# Training arguments that the step reads.
_ARGUMENTS = (
    "max_grad_norm",
    "label_smoothing_factor",
    "bf16",
    "gradient_accumulation_steps",
    "average_tokens_across_devices",
    "past_index",
    "optim",
)


class ReplayedLoss:
    """What a replayed `training_step` returns. Adding it to the loop's sum of losses changes nothing, because the
    executable has already added the loss to the sum.

    Args:
        device: of the loss; the loop compares it with the device of the sum.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __radd__(self, total: torch.Tensor) -> torch.Tensor:
        return total

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.add, torch.Tensor.add_):
            # The sum. It may be a pending output of the step, which a dispatched operation would wait for.
            return args[0]
        raise _missing(getattr(func, "__name__", str(func)))

    def __getattr__(self, name: str) -> Any:
        raise _missing(name)


def _missing(name: str) -> AttributeError:
    return AttributeError(
        f"{name}: the loss of a replayed step is part of the logged sum only; pass step_replay=False to the "
        "trainer to get it as a tensor of its own"
    )


def obstacle_around(trainer: Any) -> str | None:
    """Why steps of this trainer are never replayed; None if they may be."""
    surrounding = overridden(trainer, _AROUND)
    if surrounding is not None:
        return f"{surrounding} is overridden, and surrounds the step with code of its own"
    for callback in trainer.callback_handler.callbacks:
        hook = getattr(callback.on_pre_optimizer_step, "__func__", None)
        if hook is not TrainerCallback.on_pre_optimizer_step:
            return f"{type(callback).__name__}.on_pre_optimizer_step runs in the middle of the step"
    accelerator = trainer.accelerator
    for name in _OF_ACCELERATOR:
        if getattr(getattr(accelerator, name), "__func__", None) is not getattr(Accelerator, name):
            return f"the method {name} of the accelerator was replaced"
    return _obstacle_in_update(trainer.optimizer)


def _obstacle_in_update(optimizer: Any) -> str | None:
    """Python code in the update besides the `step` of the optimizer's class, which a replay would skip."""
    for hook in (*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()):
        # While a step is open, the core has hooks of its own there.
        if not getattr(hook, "__module__", "").startswith("xla_adapters."):
            return "all optimizers have a hook, whose Python a replay would leave out"
    # accelerate wraps the optimizer.
    while optimizer is not None:
        kind, step = type(optimizer), vars(optimizer).get("step")
        if getattr(step, "_wrapped_by_lr_sched", False):
            step = step.__wrapped__ if step.__wrapped__ is not kind.step else None
        if step is not None:
            return f"the method step of {kind.__name__} was replaced"
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            if getattr(optimizer, hooks, None):
                return f"{kind.__name__} has a hook, whose Python a replay would leave out"
        optimizer = getattr(optimizer, "optimizer", None)
    return None


def obstacle_within(trainer: Any, *, trains: bool = True) -> str | None:
    """Why a replay might skip user code, which `step_replay=True` permits; None if it cannot.

    Args:
        trainer: the trainer.
        trains: whether the step is a training step.
    """
    within = overridden(trainer, _WITHIN if trains else _WITHIN_EVALUATION)
    if within is not None:
        return f"{within} is overridden, and a replay would leave out what it does beside tensors"
    smoother = trainer.label_smoother
    if smoother is not None and type(smoother) is not LabelSmoother:
        return f"{type(smoother).__name__} is a label smoother of your own, which a replay would leave out"
    return None


def call_spec(
    trainer: Any,
    model: torch.nn.Module,
    inputs: Any,
    code: TrackedCode,
    *,
    known: tuple[Hashable, ...],
    trains: bool = True,
) -> CallSpec:
    """The description of the call of the step that begins.

    Args:
        trainer: the trainer.
        model: what is trained or evaluated.
        inputs: the batch on the device, and other values that differ from call to call.
        code: the user code in the step.
        known: further values that the step depends on; calls with different ones get different executables.
        trains: whether it is a training step.
    """
    leaves, spec = tree_flatten(as_dicts(inputs))
    obstacle = obstacle_within(trainer, trains=trains) or code.obstacle or batch_obstacle(inputs)
    arguments: tuple[Hashable, ...] = tuple(str(getattr(trainer.args, name, None)) for name in _ARGUMENTS)
    shapes = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)
    smoother = trainer.label_smoother
    known = (
        *known,
        *key_of(code),
        trainer.model_accepts_loss_kwargs,
        *(str(getattr(smoother, name, None)) for name in ("epsilon", "ignore_index")),
        id(model),
    )
    return CallSpec(
        key=(str(spec), shapes, arguments, known),
        batch=[leaf for leaf in leaves if isinstance(leaf, torch.Tensor)],
        extras=[trainer._tr_loss] if trains else [],
        modules=[model, *code.modules],
        set_modes=model.train if trains else None,
        patience=_PATIENCE,
        obstacle=obstacle,
        change=code.change,
        constants=code.tensors,
        look_again=code.look_again,
    )
