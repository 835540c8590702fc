"""Optimizers of transformers: their choice on XLA, and what the core must know of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.optimization import Adafactor
from transformers.training_args import OptimizerNames

from hf_trainer.refusals import check_optimizer
from xla_adapters import register_eager_optimizer, register_state_init

_Choice = tuple[Any, dict[str, Any]]


def choose_optimizer(choose: Callable[..., _Choice], args: TrainingArguments, model: Any) -> _Choice:
    """As `Trainer.get_optimizer_cls_and_kwargs`. The default, fused AdamW, becomes plain AdamW.

    Args:
        choose: the method of the class that the mixin is mixed into.
        args: `optim` and `optim_args` name the optimizer; not changed.
        model: to be trained.

    Returns:
        The class of the optimizer, and its arguments.

    Raises:
        UnsupportedOptionError: the optimizer cannot work on XLA.
    """
    if args.optim == OptimizerNames.ADAMW_TORCH_FUSED:
        args = copy.copy(args)
        args.optim = OptimizerNames.ADAMW_TORCH
    cls, kwargs = choose(args, model)
    check_optimizer(None, (cls, kwargs))
    if args.optim == OptimizerNames.STABLE_ADAMW:
        # Its default asks triton for a GPU, on whatever device the parameters are.
        kwargs = {**kwargs, "triton": False}
    return cls, kwargs


class OptimizerChoice:
    """`Trainer.get_optimizer_cls_and_kwargs` with `choose_optimizer` around that of the next class.

    transformers' is a static method, and may be called on the class; an override may be a method of instances.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, trainer: object | None, cls: type) -> Callable[..., _Choice]:
        found: Any = super(self._owner, cls if trainer is None else trainer)
        choose: Callable[..., _Choice] = getattr(found, self._name)

        def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: Any = None) -> _Choice:
            return choose_optimizer(choose, args, model)

        return get_optimizer_cls_and_kwargs


def follow_moved_parameters(
    optimizer: torch.optim.Optimizer, moved: Mapping[torch.nn.Parameter, torch.nn.Parameter]
) -> None:
    """Lets an optimizer that was made before its model was moved update the model's new parameters.

    Args:
        optimizer: changed in place. Its state follows the parameters, as when it is loaded.
        moved: the parameters on the device by those that they replace.
    """
    groups = optimizer.param_groups
    present = {parameter for group in groups for parameter in group["params"]}
    # A tie that the move had undone, and that was made again: the optimizer has the tied parameter already.
    followed = {new: old for old, new in moved.items() if old in present and new not in present}
    moved = {old: new for new, old in followed.items()}
    if not moved:
        return
    state = optimizer.state_dict()
    for group in groups:
        group["params"] = [moved.get(parameter, parameter) for parameter in group["params"]]
    optimizer.state.clear()
    if state["state"]:
        optimizer.load_state_dict(state)


def innermost(optimizer: Any) -> torch.optim.Optimizer | None:
    """The optimizer inside accelerate's wrappers; None if there is none yet."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer  # type: ignore[no-any-return]


def _adafactor_state(optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """The state that `transformers.optimization.Adafactor.step` creates in its first call (5.23)."""
    factored, first_moment = optimizer._get_options(group, parameter.shape)
    dtype = torch.float32 if parameter.dtype in (torch.float16, torch.bfloat16) else parameter.dtype

    def zeros(shape: torch.Size) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype).to(parameter.device)

    state: dict[str, Any] = {"step": 0}
    shape = parameter.shape
    if first_moment:
        state["exp_avg"] = zeros(shape)
    if factored:
        state["exp_avg_sq_row"] = zeros(shape[:-1])
        state["exp_avg_sq_col"] = zeros(shape[:-2] + shape[-1:])
    else:
        state["exp_avg_sq"] = zeros(shape)
    # The update sets it before reading it. A number instead of a tensor would make the first step another graph.
    state["RMS"] = zeros(torch.Size())
    return state


def register_transformers_optimizers() -> None:
    """Registers the optimizers with the core; called when this package is imported."""
    register_state_init(Adafactor, _adafactor_state)
    register_eager_optimizer(
        Adafactor,
        "scale_parameter=True compares the norm of every parameter on the host",
        when=lambda optimizer: any(group["scale_parameter"] for group in optimizer.param_groups),
    )
