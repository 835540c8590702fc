"""Replayed steps in HF's loops: which may be replayed, their `CallSpec`, the user code in them, and TRL's metrics."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.trainer_pt_utils import LabelSmoother

from xla_adapters import XLAConfig
from xla_adapters.loop.replay import StepCode, batch_of, key_of, optimizer_reason
from xla_adapters.replay.call_spec import CallSpec, batch_reason
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
from xla_adapters.utils.nested_values import is_simple

# The modules of TRL's trainers whose code was read, and of their base class, from which others are derived, too.
_TRAINERS = tuple(f"trl.trainer.{name}_trainer" for name in ("sft", "dpo", "reward", "kto", "grpo"))
READ_TRAINERS = ("trl.trainer.base_trainer", *_TRAINERS)
# Their methods that compute the loss and its metrics. An override may do anything.
TRL_METHODS = (
    *("compute_loss", "_compute_loss", "_compute_kl_logps", "get_tp_size"),
    *("_get_per_token_logps_and_entropies", "get_high_entropy_mask", "get_off_policy_mask", "get_gamma_weights"),
)
# What these change, and a replay does, too.
_METRICS, _TOKENS = "_metrics", "_total_train_tokens"
# The metric that is no mean: the tokens of the whole training.
_NUM_TOKENS = "num_tokens"
# What trainers that generate add around the step, also to one that is replayed.
_METRICS_AROUND = (_NUM_TOKENS, "step_time")
_GATHERING = ("gather", "gather_for_metrics", "reduce")
# The method by which trainers generate.
SCORES = "_generate_and_score_completions"
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
        return own | _called_in(models)

    return _code(lambda: trainer.model, trainer, config, found)


def model_code(model: torch.nn.Module, config: XLAConfig) -> StepCode:
    """The user code in a call of a model outside of a trainer's step.

    Args:
        model: is called.
        config: with `step_replay=True` the user promises that the code is safe.
    """

    return _code(lambda: model, None, config, lambda models: {"forward": model, **_called_in(models)})


def _code(
    model: Callable[[], torch.nn.Module],
    trainer: Any,
    config: XLAConfig,
    found: Callable[[Mapping[str, PreTrainedModel]], Mapping[str, Any]],
) -> StepCode:
    """The user code in calls of a model: the functions that are found, of a trainer if there is one."""
    return StepCode(
        _FRAMEWORK,
        found,
        lambda functions, analysis: _examine(model(), trainer, functions, analysis),
        promised=lambda: [] if config.step_replay is True else None,
        parts=lambda: {name: part for name, part in model().named_modules() if isinstance(part, PreTrainedModel)},
    )


def _examine(model: torch.nn.Module, trainer: Any, functions: Mapping[str, Any], analysis: Analysis) -> None:
    part = "forward"
    try:
        analysis.examine(model, (), {UNKNOWN: DATA})
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
        name = (trainer is not None and overridden(trainer, (part,))) or f"the {part} of your own"
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


def _called_in(models: Mapping[str, PreTrainedModel]) -> dict[str, Any]:
    return {
        what: function
        for name, model in models.items()
        for what, function in _called_by(model, name or type(model).__name__)
    }


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
_DEADLINE = 4
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


def reason_around(trainer: Any) -> str | None:
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
    return metrics_reason(trainer) or optimizer_reason(trainer.optimizer)


def reason_within(trainer: Any, *, trains: bool = True) -> str | None:
    """Why a replay might skip user code, which `step_replay=True` permits; None if it cannot.

    Args:
        trainer: the trainer.
        trains: whether the step is a training step.
    """
    of_trl = TRL_METHODS if appends_metrics(trainer) else ()
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
    reason = reason_within(trainer, trains=trains) or code.reason or batch_reason(inputs)
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
        deadline=_DEADLINE,
        reason=reason,
        change=code.change,
        constants=code.tensors,
        keeps_numbers=appends_metrics(trainer),
        look_again=code.look_again,
    )


# ---- TRL: what its code does beside tensors, and what it depends on ------------------------------

# `compute_loss` of TRL reads numbers and appends them to `_metrics`, which a replay must do, too. Of which versions and
# trainers that is true was found out by reading them: see `READ_VERSIONS` of the core, and `READ_TRAINERS`.

# By name of the metric what one step appends; and the tokens that it counts.
Added = tuple[dict[str, list[Any]], Any]


def appends_metrics(trainer: Any) -> bool:
    """Whether it is known what the steps of a trainer do to its metrics."""
    return any(cls.__module__ in _TRAINERS and is_trusted(cls) for cls in type(trainer).__mro__)


def metrics_reason(trainer: Any) -> str | None:
    """Why a replay could not do what TRL's code does in a step; None if it could, or if it is no trainer of TRL."""
    if not appends_metrics(trainer):
        return None
    if type(getattr(trainer, "maybe_activation_offload_context", nullcontext())) is not nullcontext:
        return "activation_offloading=True moves activations in the middle of the step"
    if getattr(trainer, "use_adaptive_entropy", False):
        return "use_adaptive_entropy=True changes the loss by what each step has computed"
    if trainer.args.world_size > 1:
        return "the metrics of TRL are gathered from several processes"
    for name in _GATHERING:
        if getattr(getattr(trainer.accelerator, name), "__func__", None) is not getattr(Accelerator, name):
            return f"the method {name} of the accelerator was replaced"
    return None


@contextmanager
def metrics_added(trainer: Any, mode: str) -> Iterator[Added]:
    """Around TRL's code of a step: yields what it appends to the metrics, complete at the exit.

    Args:
        trainer: the trainer.
        mode: `"train"` or `"eval"`.
    """
    added: dict[str, list[Any]] = {}
    tokens: list[Any] = []
    metrics = getattr(trainer, _METRICS)[mode]
    before = {name: len(values) for name, values in metrics.items()}
    total = getattr(trainer, _TOKENS)
    # The step's own count is needed, and not the total.
    setattr(trainer, _TOKENS, 0)
    try:
        yield added, tokens
    finally:
        tokens.append(getattr(trainer, _TOKENS))
        setattr(trainer, _TOKENS, total + tokens[0])
    around = _METRICS_AROUND if hasattr(trainer, SCORES) else ()
    for name, values in metrics.items():
        if name == _NUM_TOKENS and name not in around:
            values[:] = [getattr(trainer, _TOKENS)]
            added[name] = []
        elif name not in around and len(values) > before.get(name, 0):
            added[name] = values[before.get(name, 0) :]


def add_metrics(trainer: Any, mode: str, added: Added) -> None:
    """Does what TRL's code does in a step that is replayed.

    Args:
        trainer: the trainer.
        mode: `"train"` or `"eval"`.
        added: what the step appends.
    """
    by_name, (tokens,) = added
    setattr(trainer, _TOKENS, getattr(trainer, _TOKENS) + tokens)
    metrics = getattr(trainer, _METRICS)[mode]
    for name, values in by_name.items():
        if name == _NUM_TOKENS:
            metrics[name] = [getattr(trainer, _TOKENS)]
        else:
            metrics[name].extend(values)


def depends_on(trainer: Any) -> tuple[Hashable, ...]:
    """What TRL's code reads of a trainer and its arguments: steps for which it differs are different steps."""
    if not appends_metrics(trainer):
        return ()
    cls: Any = type(trainer)
    names = _names_in(cls)
    return tuple(
        (name, repr(value) if is_simple(value) else _Same(value))
        for owner in (vars(trainer), vars(trainer.args))
        for name, value in owner.items()
        if name in names and name not in (_METRICS, _TOKENS)
    )


class _Same:
    """Equal to another one of the same object, which it keeps alive."""

    def __init__(self, item: object) -> None:
        self._item = item

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._item is self._item

    def __hash__(self) -> int:
        return id(self._item)


@functools.cache
def _names_in(cls: Any) -> frozenset[str]:
    """The names of all attributes that TRL's methods of a class use."""
    found: set[str] = set()
    for base in cls.__mro__:
        if base.__module__ in READ_TRAINERS:
            members = [vars(base)[name] for name in TRL_METHODS if name in vars(base)]
            codes = [inspect.unwrap(getattr(member, "__func__", member)).__code__ for member in members]
            while codes:
                code = codes.pop()
                found.update(code.co_names)
                codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(found)
