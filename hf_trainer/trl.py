"""Replayed steps of TRL's trainers: what their code does beside tensors, and what it depends on.

Their `compute_loss` reads numbers and appends them to `_metrics`, which a replay must do, too. Of which versions and
trainers that is true was found out by reading them: see `READ_VERSIONS` of the core, and `READ_TRAINERS`.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from accelerate import Accelerator

from xla_adapters.replay.safety import is_trusted
from xla_adapters.utils.nested_values import is_simple

# The modules of the trainers whose code was read, and of their base class, from which others are derived, too.
_TRAINERS = tuple(f"trl.trainer.{name}_trainer" for name in ("sft", "dpo", "reward", "kto", "grpo"))
READ_TRAINERS = ("trl.trainer.base_trainer", *_TRAINERS)
# Their methods that compute the loss and its metrics. An override may do anything.
METHODS = (
    *("compute_loss", "_compute_loss", "_compute_kl_logps", "get_tp_size"),
    *("_get_per_token_logps_and_entropies", "get_high_entropy_mask", "get_off_policy_mask", "get_gamma_weights"),
)
# What these change, and a replay does, too.
_METRICS, _TOKENS = "_metrics", "_total_train_tokens"
# The metric that is no mean: the tokens of the whole training.
_NUM_TOKENS = "num_tokens"
# What trainers that generate add around the step, also to one that is replayed.
_AROUND = (_NUM_TOKENS, "step_time")
_OF_ACCELERATOR = ("gather", "gather_for_metrics", "reduce")
# The method by which trainers generate.
SCORES = "_generate_and_score_completions"

# By name of the metric what one step appends; and the tokens that it counts.
Added = tuple[dict[str, list[Any]], Any]


def appends_metrics(trainer: Any) -> bool:
    """Whether it is known what the steps of a trainer do to its metrics."""
    return any(cls.__module__ in _TRAINERS and is_trusted(cls) for cls in type(trainer).__mro__)


def metrics_obstacle(trainer: Any) -> str | None:
    """Why a replay could not do what TRL's code does in a step; None if it could, or if it is no trainer of TRL."""
    if not appends_metrics(trainer):
        return None
    if type(getattr(trainer, "maybe_activation_offload_context", nullcontext())) is not nullcontext:
        return "activation_offloading=True moves activations in the middle of the step"
    if getattr(trainer, "use_adaptive_entropy", False):
        return "use_adaptive_entropy=True changes the loss by what each step has computed"
    if trainer.args.world_size > 1:
        return "the metrics of TRL are gathered from several processes"
    for name in _OF_ACCELERATOR:
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
    around = _AROUND if hasattr(trainer, SCORES) else ()
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
            members = [vars(base)[name] for name in METHODS if name in vars(base)]
            codes = [inspect.unwrap(getattr(member, "__func__", member)).__code__ for member in members]
            while codes:
                code = codes.pop()
                found.update(code.co_names)
                codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(found)
