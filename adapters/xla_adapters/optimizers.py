"""Makes an optimizer's first step the same graph as all later ones."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import LBFGS, SGD, Adafactor, Adam, AdamW, Muon, Optimizer, SparseAdam
from torch.utils.weak import WeakTensorKeyDictionary

from xla_adapters.backend import Backend, get_backend
from xla_adapters.optimizer_packages import eager_reason_of

StateInit = Callable[[Optimizer, dict[str, Any], torch.Tensor], dict[str, Any] | None]

_EAGER: dict[type[Optimizer], tuple[str, Callable[[Any], bool]]] = {
    LBFGS: ("it evaluates the closure until a line search on the host is content", lambda _: True),
    Adafactor: (
        "it reads the norms of every parameter on the host (transformers.optimization.Adafactor can be traced)",
        lambda _: True,
    ),
    Muon: ("torch_xla hands its addmm, scaled by beta, to the CPU", lambda _: True),
    SparseAdam: ("it works on sparse gradients, which XLA does not have", lambda _: True),
}
# Numbers of the update rule. torch's ASGD puts all of them on the parameter's device, and reads them there.
_HOST_NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})
_STATE_INITS: dict[type[Optimizer], StateInit] = {}
_warned: set[type[Optimizer]] = set()
# State known to lie as its parameters do.
_cut = WeakTensorKeyDictionary()


class EagerOptimizerWarning(UserWarning):
    """An optimizer that cannot be part of the step's graph runs eagerly."""


def register_eager_optimizer(
    cls: type[Optimizer], reason: str, *, when: Callable[[Any], bool] = lambda optimizer: True
) -> None:
    """Lets an optimizer that reads values on the host run eagerly, outside the step's graph.

    Args:
        cls: the optimizer's class; subclasses count too.
        reason: completes "runs eagerly: ..." in the warning its users see.
        when: given the optimizer, whether this applies (all of its kind by default).
    """
    _EAGER[cls] = (reason, when)


def register_state_init(cls: type[Optimizer], init: StateInit) -> None:
    """Says how the state of an optimizer from outside `torch.optim` begins.

    Args:
        cls: the optimizer's class.
        init: called with (optimizer, param group, parameter); returns the state as it stands before
            the first update, its tensors on the parameter's device, or `None` if there is none.
    """
    _STATE_INITS[cls] = init


def eager_reason(optimizer: Optimizer) -> str | None:
    """Why this optimizer cannot be traced, or `None` if it can."""
    for cls in type(optimizer).__mro__:
        if cls in _EAGER:
            reason, applies = _EAGER[cls]
            return reason if applies(optimizer) else None
    return eager_reason_of(type(optimizer))


def stand_in_for(optimizer: Optimizer, **attributes: Any) -> Optimizer:
    """An optimizer whose `step` is run for the numbers it computes; hooks of steps leave it alone.

    Args:
        optimizer: whose attributes it has.
        **attributes: those that differ.
    """
    stand_in: Optimizer = object.__new__(type(optimizer))
    own = {name: value for name, value in vars(optimizer).items() if name != "step"}
    stand_in.__dict__.update(own, **attributes, _is_stand_in=True)
    # It asks for a CUDA device, which may load a library at each call.
    stand_in._cuda_graph_capture_health_check = lambda: None  # type: ignore[method-assign]
    return stand_in


def is_stand_in(optimizer: Optimizer) -> bool:
    """Whether it was made by `stand_in_for`."""
    return "_is_stand_in" in vars(optimizer)


def needs_no_watch(optimizer: Optimizer) -> bool:
    """Whether the optimizer is known to read nothing and to write only what `record_optimizer` keeps.

    Watching each of its many small operations would cost more than all the rest of the watch.
    """
    return type(optimizer) in (SGD, Adam, AdamW) and not any(
        isinstance(value, torch.Tensor) for group in optimizer.param_groups for value in group.values()
    )


def warn_eager(optimizer: Optimizer, reason: str) -> None:
    """Tells once per optimizer class that it runs eagerly."""
    if type(optimizer) in _warned:
        return
    _warned.add(type(optimizer))
    warnings.warn(
        f"{type(optimizer).__name__} runs eagerly: {reason}. Forward and backward stay one compiled graph; "
        "the update is executed operation by operation.",
        EagerOptimizerWarning,
        stacklevel=2,
    )


def prime(optimizer: Optimizer) -> int:
    """Creates the state the optimizer would create in its first step, without stepping.

    Steps do this by themselves when they meet a new optimizer. Parameters, hyper-parameters, random
    numbers and the course of the training are as without it.

    Args:
        optimizer: any `torch.optim` optimizer (others: see `register_state_init`).

    Returns:
        How many parameters got a state.
    """
    return _prime(optimizer, lambda parameter: parameter.requires_grad)


def prepare_for_tracing(optimizer: Optimizer, backend: Backend) -> None:
    """Gives the optimizer the state of its steady course; called when it steps inside a step."""
    _prime(optimizer, lambda parameter: parameter.grad is not None)
    _move_counts_to_host(optimizer, backend)
    if backend.is_spmd():
        _cut_like_parameters(optimizer, backend)


def _prime(optimizer: Optimizer, wanted: Callable[[torch.Tensor], bool]) -> int:
    init = _find_state_init(optimizer)
    if init is None:
        return 0
    primed = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if wanted(parameter) and not optimizer.state.get(parameter):
                state = init(optimizer, group, parameter)
                if state:
                    optimizer.state[parameter] = state
                    primed += 1
                else:
                    optimizer.state.pop(parameter, None)
    return primed


def _find_state_init(optimizer: Optimizer) -> StateInit | None:
    for cls in type(optimizer).__mro__:
        if cls in _STATE_INITS:
            return _STATE_INITS[cls]
    if isinstance(optimizer, SGD):
        return _sgd_state
    # A subclass of a torch optimizer that brings its own step may keep another state.
    if hasattr(optimizer, "_init_group") and not _overrides_step(type(optimizer)):
        return _torch_state
    return None


def _overrides_step(cls: type[Optimizer]) -> bool:
    for base in cls.__mro__:
        if "step" in vars(base):
            return not base.__module__.startswith("torch.optim")
    return True


def _sgd_state(optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any] | None:
    # torch starts the buffer as a copy of the first gradient. Zeros give the same values, unless
    # dampening scales every gradient but the first.
    if group["momentum"] == 0 or group["dampening"] != 0:
        return None
    return {"momentum_buffer": _place(torch.zeros(parameter.shape, dtype=parameter.dtype), parameter)}


def _torch_state(optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any] | None:
    """Lets the optimizer initialise stand-ins of the parameter: on `meta` to learn which parts of the
    state belong on the parameter's device, on the host for the values."""
    placed = _init_stand_in(optimizer, group, torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
    values = _init_stand_in(optimizer, group, torch.empty(parameter.shape, dtype=parameter.dtype))
    state = {}
    for key, value in values.items():
        if isinstance(value, torch.Tensor) and placed[key].device.type == "meta" and not _counts(group, key, value):
            value = _place(value, parameter)
        state[key] = value
    return state


def _place(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Brings a part of the state to the parameter's device, cut as the parameter if it has its shape."""
    backend = get_backend()
    if parameter.device != backend.device():
        return value.to(parameter.device)
    tiles = backend.tiles_of(parameter) if backend.is_spmd() and value.shape == parameter.shape else None
    return backend.to_device(value) if tiles is None else backend.upload_sharded(value, tiles)


def _cut_like_parameters(optimizer: Optimizer, backend: Backend) -> None:
    """Cuts state that came whole (from a checkpoint) as its parameters are cut."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if not isinstance(state, dict) or all(value in _cut for value in _tensors_of(state)):
                continue
            tiles = backend.tiles_of(parameter)
            for value in _tensors_of(state):
                if tiles is not None and value.shape == parameter.shape and backend.is_backend_tensor(value):
                    backend.shard(value, tiles)
                _cut[value] = True


def _tensors_of(state: dict[str, Any]) -> list[torch.Tensor]:
    return [value for value in state.values() if isinstance(value, torch.Tensor)]


def _init_stand_in(optimizer: Any, group: dict[str, Any], stand_in: torch.Tensor) -> dict[str, Any]:
    stand_in.requires_grad_(True)
    stand_in.grad = torch.zeros((), dtype=stand_in.dtype, device=stand_in.device).expand(stand_in.shape)
    lists = list(inspect.signature(optimizer._init_group).parameters)[1:]
    optimizer._init_group({**group, "params": [stand_in]}, *([] for _ in lists))
    state: dict[str, Any] = optimizer.state.pop(stand_in, {})
    return state


def _counts(group: dict[str, Any], key: str, value: Any) -> bool:
    """Whether an entry of the state is a number that the optimizer reads on the host at each step."""
    on_device = group.get("capturable") or group.get("fused")
    return key in _HOST_NUMBERS and isinstance(value, torch.Tensor) and value.ndim == 0 and not on_device


def _move_counts_to_host(optimizer: Optimizer, backend: Backend) -> None:
    """Brings step counts back to the host, where optimizers that are not capturable expect them.

    A loader that sends a whole state dict to the device (accelerate does) would otherwise cost one
    read per parameter and step.
    """
    stray: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if isinstance(state, dict):
                for key, value in state.items():
                    if _counts(group, key, value) and backend.is_backend_tensor(value):
                        stray.append((state, key, value))
    for (state, key, _), host in zip(stray, backend.to_host([value for _, _, value in stray]), strict=True):
        state[key] = host


__all__ = [
    "EagerOptimizerWarning",
    "eager_reason",
    "prepare_for_tracing",
    "prime",
    "register_eager_optimizer",
    "register_state_init",
    "warn_eager",
]
