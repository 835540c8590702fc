"""Replayed steps in HF's loops: which steps may be replayed, their `CallSpec`, and the user code in them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.trainer_pt_utils import LabelSmoother

from hf_trainer.trl import METHODS, READ_TRAINERS, appends_metrics, depends_on, metrics_obstacle
from xla_adapters import XLAConfig
from xla_adapters.loop.replay import StepCode, batch_of, key_of, optimizer_obstacle
from xla_adapters.replay.call_spec import CallSpec
from xla_adapters.replay.guards.batch import batch_obstacle
from xla_adapters.replay.safety import (
    DATA,
    MODULE_CALLS,
    UNKNOWN,
    Analysis,
    FrameworkModel,
    Unsafe,
    Value,
    is_trusted,
    nothing,
)
from xla_adapters.replay.tracked_code import TrackedCode

# Methods of classes in these packages are not user code.
_LIBRARIES = ("transformers.", "hf_trainer.", *READ_TRAINERS)
_FRAMEWORK = FrameworkModel(
    calls={**MODULE_CALLS, Trainer.compute_loss: nothing},
    properties=dict.fromkeys(("device", "dtype"), nothing),
)
# Functions that the user passes to the trainer.
_GIVEN = ("compute_loss_func", "preprocess_logits_for_metrics")
# Prefix of the names of loss functions of a library's models.
_LOSS = "loss_function"
# Annotations of a loss that returns one tensor.
_TENSORS = ("Tensor", "torch.Tensor", torch.Tensor)
# Methods of sentence-transformers' trainers that compute the loss.
_BY_SENTENCES = ("compute_loss", "collect_features", "override_model_in_loss", "track_loss_components")
# Registries in which a library's model looks up its attention and its masks.
_INTERFACES = {"attention function": ALL_ATTENTION_FUNCTIONS, "attention mask": ALL_MASK_ATTENTION_FUNCTIONS}


def step_code(trainer: Any, config: XLAConfig, functions: Callable[[], Mapping[str, Any]] = dict) -> StepCode:
    """The user code in one kind of step of a trainer.

    Args:
        trainer: the trainer.
        config: with `step_replay=True` the user promises that the code is safe.
        functions: returns further functions that the steps call, by name (default: none).
    """

    def found(models: Mapping[str, PreTrainedModel]) -> dict[str, Any]:
        own = {
            "forward": trainer.model,
            "compute_loss": trainer.compute_loss,
            "compute_loss_func": trainer.compute_loss_func,
            "label_smoother": trainer.label_smoother,
            **functions(),
            **_of_sentence_transformers(trainer),
        }
        for name, model in models.items():
            own.update(_called_by(model, name or type(model).__name__))
        return own

    return StepCode(
        _FRAMEWORK,
        found,
        functools.partial(_examine, trainer),
        promised=lambda: [] if config.step_replay is True else None,
        parts=lambda: {name: part for name, part in trainer.model.named_modules() if isinstance(part, PreTrainedModel)},
    )


def _examine(trainer: Any, functions: Mapping[str, Any], analysis: Analysis) -> None:
    part = "forward"
    try:
        analysis.examine(trainer.model, (), {UNKNOWN: DATA})
        for part, function in functions.items():
            if part == "compute_loss":
                if _of_sentence_transformers(trainer):
                    _examine_losses(_losses(trainer).values(), analysis)
                elif overridden(trainer, (part,)) is not None:
                    # The batch is the trainer's own copy.
                    analysis.examine(trainer.compute_loss, [Value((trainer.model,))], {UNKNOWN: DATA})
            elif part in _GIVEN or part.startswith(_LOSS):
                if function is not None and not is_trusted(function):
                    analysis.examine(function, (), {UNKNOWN: DATA})
            elif part.startswith(tuple(_INTERFACES)) and function is not None and not is_trusted(function):
                # It gets modules as arguments, which are not known before the call, and may do anything with them.
                raise Unsafe(f"{getattr(function, '__qualname__', type(function).__qualname__)} is not followed")
    except Unsafe as error:
        name = overridden(trainer, (part,)) or f"the {part} of your own"
        raise Unsafe(f"{name} is not known to be safe to leave out: {error}") from None


def _of_sentence_transformers(trainer: Any) -> dict[str, Any]:
    """What `compute_loss` of sentence-transformers calls, by name; empty if a method of it is user code, or missing."""
    methods = {name: getattr(trainer, name, None) for name in _BY_SENTENCES}
    for method in methods.values():
        function = getattr(method, "__func__", None)
        package = str(getattr(function, "__module__", "")).partition(".")[0]
        if package != "sentence_transformers" or not is_trusted(function):
            return {}
    return {**methods, **_losses(trainer)}


def _losses(trainer: Any) -> dict[str, Any]:
    """The losses of a trainer of sentence-transformers: one, or one for each data set."""
    losses = trainer.loss if isinstance(trainer.loss, dict) else {"": trainer.loss}
    return {f"loss of {name}": loss for name, loss in losses.items()}


def _examine_losses(losses: Iterable[Any], analysis: Analysis) -> None:
    """Follows the losses that `compute_loss` of sentence-transformers calls.

    Raises:
        Unsafe: as `Analysis.examine`; or a loss may return its parts, which the trainer adds up.
    """
    for loss in losses:
        forward = getattr(loss, "forward", None)
        # Not evaluated: the names in annotations need not be there.
        returned = getattr(forward, "__annotations__", {}).get("return")
        if not isinstance(loss, torch.nn.Module) or not is_trusted(forward) or returned not in _TENSORS:
            raise Unsafe(f"{type(loss).__name__} may return parts of the loss, which the trainer adds up")
        analysis.examine(loss, (), {UNKNOWN: DATA})


def _called_by(model: PreTrainedModel, name: str) -> Iterator[tuple[str, Any]]:
    """The functions of a library's model that the user can replace: its loss, attention and mask, each with a name."""
    loss = getattr(model, "_loss_function", None) or LOSS_MAPPING.get(str(getattr(model, "loss_type", None)))
    yield f"{_LOSS} ({name})", loss
    chosen = getattr(model.config, "_attn_implementation", None)
    for kind, interface in _INTERFACES.items():
        yield f"{kind} ({name})", interface.get(chosen)


def overridden(trainer: Any, names: tuple[str, ...]) -> str | None:
    """The first of these methods that is user code, in a class or on the instance; None if there is none."""
    own = vars(trainer)
    for name in names:
        if name in own:
            return f"the trainer's own {name}"
        for cls in type(trainer).__mro__:
            # The user may also have replaced a method of a library's class.
            if name in vars(cls) and not (
                cls.__module__.startswith(_LIBRARIES) and _is_trusted_member(vars(cls)[name])
            ):
                return f"{cls.__name__}.{name}"
            if cls is Trainer:
                break
    return None


def _is_trusted_member(member: Any) -> bool:
    return isinstance(member, property) or is_trusted(member)


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
    return metrics_obstacle(trainer) or optimizer_obstacle(trainer.optimizer)


def obstacle_within(trainer: Any, *, trains: bool = True) -> str | None:
    """Why a replay might skip user code, which `step_replay=True` permits; None if it cannot.

    Args:
        trainer: the trainer.
        trains: whether the step is a training step.
    """
    of_trl = METHODS if appends_metrics(trainer) else ()
    within = overridden(trainer, (*(_WITHIN if trains else _WITHIN_EVALUATION), *of_trl))
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
    tensors, key = batch_of(inputs)
    obstacle = obstacle_within(trainer, trains=trains) or code.obstacle or batch_obstacle(inputs)
    arguments: tuple[Hashable, ...] = tuple(str(getattr(trainer.args, name, None)) for name in _ARGUMENTS)
    smoother = trainer.label_smoother
    known = (
        *known,
        *key_of(code),
        trainer.model_accepts_loss_kwargs,
        *(str(getattr(smoother, name, None)) for name in ("epsilon", "ignore_index")),
        id(model),
        *depends_on(trainer),
    )
    return CallSpec(
        key=(*key, arguments, known),
        batch=tensors,
        extras=[trainer._tr_loss] if trains else [],
        modules=[model, *code.modules],
        set_modes=model.train if trains else None,
        patience=_PATIENCE,
        obstacle=obstacle,
        change=code.change,
        constants=code.tensors,
        keeps_numbers=appends_metrics(trainer),
        look_again=code.look_again,
    )
