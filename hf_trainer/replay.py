"""What HF's training loop must know of replayed steps: which ones may be, and what stands for their loss."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten
from transformers import Trainer, TrainerCallback

from hf_trainer.callbacks import FirstCallback
from xla_adapters.nested_values import as_dicts
from xla_adapters.program import ReplayRequest
from xla_adapters.replay.effects import Proof
from xla_adapters.replay.facts import is_simple
from xla_adapters.replay.outside import Knowledge, Unproven, Value
from xla_adapters.replay.own_code import OwnCode

# Methods whose code is the step's. Whoever overrides the first ones surrounds the step with code of his own.
_AROUND = ("training_step", "_clip_grad_norm", "_get_grad_norm", "floating_point_ops")
_WITHIN = ("compute_loss_context_manager", "autocast_smart_context_manager", "_prepare_inputs")
# Steps until the proof costs a transfer of its own, if nothing is logged before.
_PATIENCE = 4
_OWN_PACKAGES = ("transformers.", "hf_trainer.")
# Their modules compute in forward, and do nothing else that a step would miss.
_KNOWN_MODULES = ("transformers.", "torch.", "peft.", "xla_adapters.", "hf_trainer.")
_KNOWLEDGE = Knowledge(
    packages=_KNOWN_MODULES,
    calls=dict.fromkeys((Trainer.compute_loss, torch.nn.Module.parameters, torch.nn.Module.buffers), lambda owner: ()),
    properties=dict.fromkeys(("device", "dtype"), lambda owner: ()),
)
# Arguments that the step's Python looks at.
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
    """What a replayed `training_step` returns: the loop adds it to its sum, which the step's graph does itself.

    Args:
        device: the loop compares it with that of its sum.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __radd__(self, total: torch.Tensor) -> torch.Tensor:
        return total

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.add, torch.Tensor.add_):
            # To the sum, which may wait with the step to be computed: whoever dispatches must not look at it.
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
    overridden = _overridden(trainer, _AROUND)
    if overridden is not None:
        return f"{overridden} is overridden, and surrounds the step with code of its own"
    for callback in trainer.callback_handler.callbacks:
        hook = getattr(callback.on_pre_optimizer_step, "__func__", None)
        if hook is not TrainerCallback.on_pre_optimizer_step and not isinstance(callback, FirstCallback):
            return f"{type(callback).__name__}.on_pre_optimizer_step runs in the middle of the step"
    return None


def obstacle_within(trainer: Any) -> str | None:
    """Why a replay might leave something out, which `step_replay=True` accepts; None if it cannot."""
    overridden = _overridden(trainer, _WITHIN)
    if overridden is not None:
        return f"{overridden} is overridden, and a replay would leave out what it does beside tensors"
    return None


def request_of(
    trainer: Any,
    model: torch.nn.Module,
    inputs: Any,
    code: OwnCode,
    *,
    known: tuple[Hashable, ...],
    trains: bool = True,
) -> ReplayRequest:
    """What a replay must know of the pass that begins.

    Args:
        trainer: the trainer.
        model: what is trained or evaluated.
        inputs: the batch, on the device, and what else is different each time.
        code: the user's own in the step.
        known: what else the step depends on.
        trains: whether it is a training step.
    """
    code.follow()
    leaves, spec = tree_flatten(as_dicts(inputs))
    opaque = next((leaf for leaf in leaves if not isinstance(leaf, torch.Tensor) and not is_simple(leaf)), None)
    obstacle = obstacle_within(trainer) or code.obstacle
    if obstacle is None and opaque is not None:
        obstacle = f"the batch holds a {type(opaque).__name__}, which cannot be compared with that of another step"
    arguments: tuple[Hashable, ...] = tuple(str(getattr(trainer.args, name, None)) for name in _ARGUMENTS)
    shapes = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)
    smoother = trainer.label_smoother
    known = (
        *known,
        code.generation,
        trainer.model_accepts_loss_kwargs,
        None if smoother is None else smoother.epsilon,
        id(model),
    )
    return ReplayRequest(
        key=(str(spec), shapes, arguments, known),
        batch=[leaf for leaf in leaves if isinstance(leaf, torch.Tensor)],
        extras=[trainer._tr_loss] if trains else [],
        modules=[model],
        set_modes=model.train if trains else None,
        patience=_PATIENCE,
        obstacle=obstacle,
    )


def own_code(trainer: Any, *, evaluates: bool = False) -> OwnCode:
    """The user's own code in the steps of a trainer: forward passes, and the loss.

    Args:
        trainer: the trainer.
        evaluates: whether the steps are those of evaluation.
    """
    preprocess = trainer._preprocess_in_step if evaluates else None

    def examine(proof: Proof) -> None:
        part = "forward"
        try:
            proof.examine_module(trainer.model)
            part = "compute_loss"
            if _overridden(trainer, (part,)) is not None:
                # The batch is the trainer's own copy.
                proof.examine(trainer.compute_loss, [Value((trainer.model,))])
            part = "preprocess_logits_for_metrics"
            if preprocess is not None:
                proof.examine(preprocess)
            part = "compute_loss_func"
            if trainer.compute_loss_func is not None:
                proof.examine(trainer.compute_loss_func)
        except Unproven as error:
            name = _overridden(trainer, (part,)) or f"the {part} of your own"
            raise Unproven(
                f"a replay would leave out what {name} may do beside tensors: {error}; step_replay=True accepts that"
            ) from None

    return OwnCode(_KNOWLEDGE, examine, trusted=None if trainer.xla_config.step_replay != True else [])  # noqa: E712


def _overridden(trainer: Any, names: tuple[str, ...]) -> str | None:
    for cls in type(trainer).__mro__:
        if cls is Trainer:
            break
        if not cls.__module__.startswith(_OWN_PACKAGES):
            for name in names:
                if name in vars(cls):
                    return f"{cls.__name__}.{name}"
    own = vars(trainer)
    return next((f"the trainer's own {name}" for name in names if name in own), None)
