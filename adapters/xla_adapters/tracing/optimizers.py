"""`prime` and `prepare_for_tracing`: an optimizer's first step becomes the same graph as all later ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import LBFGS, SGD, Adafactor, Adam, AdamW, Muon, Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from xla_adapters.errors import EagerOptimizerWarning, UnsupportedOptionError
from xla_adapters.runtime import Runtime, get_runtime
from xla_adapters.utils.location import current_location, warn_at

StateInit = Callable[[Optimizer, dict[str, Any], torch.Tensor], dict[str, Any] | None]

_EAGER: dict[type[Optimizer], tuple[str, Callable[[Any], bool]]] = {
    LBFGS: ("it evaluates the closure until a line search on the host is content", lambda _: True),
    Adafactor: (
        "it reads the norms of every parameter on the host (transformers.optimization.Adafactor can be traced)",
        lambda _: True,
    ),
    Muon: ("torch_xla hands its addmm, scaled by beta, to the CPU", lambda _: True),
}
# Of other packages, which need not be installed, by the first part of the module's name, as released in 2025.
_EAGER_CLASSES = {
    ("grokadamw", "GrokAdamW"): "it keeps its state on the host",
    ("optimi", "StableAdamW"): "it reads the size of every parameter's update on the host",
}
_UNSUPPORTED = {
    "bitsandbytes": "its kernels are for CUDA and the CPU, and write to their arguments, which no XLA device has",
    "torchao": "its state is of quantized tensors, whose update it compiles by torch.compile for CUDA and the CPU",
    "apollo_torch": "it draws its projections with a torch.Generator on the parameters' device, and XLA has none",
}
_UNSUPPORTED_CLASSES = {
    ("lomo_optim", "AdaLomo"): "it asks CUDA for its memory, whatever the parameters' device",
    ("torch", "SparseAdam"): "it takes sparse gradients only, and those of sparse=True are dense there",
}
# Numbers of the update rule. torch's ASGD keeps all of them on the parameter's device, and reads them there.
_HOST_NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})
_STATE_INITS: dict[type[Optimizer], StateInit] = {}
_warned: set[type[Optimizer]] = set()
# Tensors of the state that are known to be sharded as their parameters are.
_sharded = WeakTensorKeyDictionary()


def register_eager_optimizer(
    cls: type[Optimizer], reason: str, *, when: Callable[[Any], bool] = lambda optimizer: True
) -> None:
    """Registers an optimizer that reads values on the host: it runs eagerly, outside the step's graph.

    Args:
        cls: the optimizer's class; subclasses count too.
        reason: completes "runs eagerly: ..." in the warning its users see.
        when: given the optimizer, whether this applies to it (by default to all of the class).
    """
    _EAGER[cls] = (reason, when)


def register_state_init(cls: type[Optimizer], init: StateInit) -> None:
    """Registers how the state of an optimizer from outside `torch.optim` is initialised.

    Args:
        cls: the optimizer's class.
        init: called with (optimizer, param group, parameter). Returns the state before the first update, with its
            tensors on the parameter's device, or `None` if there is none.
    """
    _STATE_INITS[cls] = init


def eager_reason(optimizer: Optimizer) -> str | None:
    """Why this optimizer cannot be traced, or `None` if it can."""
    for cls in type(optimizer).__mro__:
        if cls in _EAGER:
            reason, applies = _EAGER[cls]
            return reason if applies(optimizer) else None
    return _eager_reason_of(type(optimizer))


def stand_in_for(optimizer: Optimizer, **attributes: Any) -> Optimizer:
    """A copy of an optimizer whose `step` is run only for the Python numbers it computes. Hooks of steps ignore it.

    Args:
        optimizer: has the attributes that are copied.
        **attributes: those that differ.
    """
    stand_in: Optimizer = object.__new__(type(optimizer))
    own = {name: value for name, value in vars(optimizer).items() if name != "step"}
    stand_in.__dict__.update(own, **attributes, _is_stand_in=True)
    # The original asks for a CUDA device, which may load a library at each call.
    stand_in._cuda_graph_capture_health_check = lambda: None  # type: ignore[method-assign]
    return stand_in


def is_stand_in(optimizer: Optimizer) -> bool:
    """Whether it was made by `stand_in_for`."""
    return "_is_stand_in" in vars(optimizer)


def needs_no_recording(optimizer: Optimizer) -> bool:
    """Whether the optimizer is known to read nothing, and to write only what `record_optimizer` has recorded.

    Intercepting each of its many small operations would cost more than intercepting the rest of the step.
    """
    return type(optimizer) in (SGD, Adam, AdamW) and not any(
        isinstance(value, torch.Tensor) for group in optimizer.param_groups for value in group.values()
    )


def keep_own_kernels(optimizer: Optimizer) -> None:
    """Has an optimizer ignore `fused` in a state that it loads: one that was saved on a CPU or a GPU may have it.

    torch takes the options of a group from the saved state, and has no fused kernel for XLA.

    Args:
        optimizer: gets a hook of its `load_state_dict`.
    """
    hooks = getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None)
    # Optimizers around another one (Lookahead) may have none, and their states go to that one.
    if hooks is not None and _with_own_kernels not in hooks.values():
        optimizer.register_load_state_dict_pre_hook(_with_own_kernels)


def _with_own_kernels(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    # torch compares how many groups there are, after this.
    own = {index: group["fused"] for index, group in enumerate(optimizer.param_groups) if "fused" in group}
    groups = [
        {**group, "fused": own[index]} if index in own else group for index, group in enumerate(saved["param_groups"])
    ]
    return {**saved, "param_groups": groups}


def warn_eager(optimizer: Optimizer, reason: str, *, with_closure: bool) -> None:
    """Warns that an optimizer runs eagerly, once per class.

    Args:
        optimizer: that runs eagerly.
        reason: why, in words.
        with_closure: whether it is given a closure, which it calls in its update.
    """
    if type(optimizer) in _warned:
        return
    _warned.add(type(optimizer))
    which = (
        "Its closure is executed operation by operation like the update, with the forward and backward in it; only "
        "what is computed before is a compiled graph."
        if with_closure
        else "Forward and backward stay one compiled graph; the update is executed operation by operation."
    )
    warn_at(current_location(), f"{type(optimizer).__name__} runs eagerly: {reason}. {which}", EagerOptimizerWarning)


def prime(optimizer: Optimizer) -> int:
    """Creates the state the optimizer would create in its first step, without stepping.

    Steps call this for each new optimizer. It changes no parameter, hyper-parameter or random number, and no result
    of the training.

    Args:
        optimizer: any `torch.optim` optimizer (others: see `register_state_init`).

    Returns:
        How many parameters got a state.
    """
    return _prime(optimizer, lambda parameter: parameter.requires_grad)


def prepare_for_tracing(optimizer: Optimizer, runtime: Runtime) -> None:
    """Gives an optimizer the state that it has in all later steps. Called before it steps inside a step."""
    _prime(optimizer, lambda parameter: parameter.grad is not None)
    _move_counts_to_host(optimizer, runtime)
    if runtime.device.is_spmd():
        _shard_like_parameters(optimizer, runtime)


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
    # A subclass of a torch optimizer with its own `step` may have another state.
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
    where = "meta" if get_runtime().is_abstract else "cpu"
    return {"momentum_buffer": _place(torch.zeros(parameter.shape, dtype=parameter.dtype, device=where), parameter)}


def _torch_state(optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any] | None:
    """Has the optimizer initialise the state of two stand-ins for the parameter: one on `meta`, which shows what of
    the state belongs on the parameter's device, and one on the host for the values."""
    placed = _init_stand_in(optimizer, group, torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
    values = placed
    if not get_runtime().is_abstract:
        values = _init_stand_in(optimizer, group, torch.empty(parameter.shape, dtype=parameter.dtype))
    state = {}
    for key, value in values.items():
        if isinstance(value, torch.Tensor) and placed[key].device.type == "meta" and not _counts(group, key, value):
            value = _place(value, parameter)
        state[key] = value
    return state


def _place(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Copies a tensor of the state to the parameter's device, sharded as the parameter if it has its shape."""
    runtime = get_runtime()
    if parameter.device != runtime.device.torch_device():
        return value.to(parameter.device)
    tiles = runtime.spmd.tiles_of(parameter) if runtime.device.is_spmd() and value.shape == parameter.shape else None
    return runtime.transfers.to_device(value) if tiles is None else runtime.spmd.upload_sharded(value, tiles)


def _shard_like_parameters(optimizer: Optimizer, runtime: Runtime) -> None:
    """Shards state that is not sharded (it came from a checkpoint) as its parameters are."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if not isinstance(state, dict) or all(value in _sharded for value in _tensors_of(state)):
                continue
            tiles = runtime.spmd.tiles_of(parameter)
            for value in _tensors_of(state):
                if tiles is not None and value.shape == parameter.shape and runtime.device.owns(value):
                    runtime.spmd.shard(value, tiles)
                _sharded[value] = True


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


def _move_counts_to_host(optimizer: Optimizer, runtime: Runtime) -> None:
    """Moves step counts back to the host, where optimizers that are not capturable expect them.

    A loader that moves a complete state dict to the device (accelerate does) would otherwise cost one read per
    parameter and step.
    """
    stray: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if isinstance(state, dict):
                for key, value in state.items():
                    if _counts(group, key, value) and runtime.device.owns(value):
                        stray.append((state, key, value))
    for (state, key, _), host in zip(stray, runtime.transfers.to_host([value for _, _, value in stray]), strict=True):
        state[key] = host


# ---- of other packages ------------------------------------------------------------------------------


def _eager_reason_of(cls: type[Optimizer]) -> str | None:
    """Why optimizers of this class run eagerly; `None` if nothing is known of their package."""
    return next((_EAGER_CLASSES[name] for name in _names(cls) if name in _EAGER_CLASSES), None)


def check_supported(cls: type[Optimizer]) -> None:
    """Raises if optimizers of this class cannot update parameters on an XLA device.

    Raises:
        UnsupportedOptionError: with the alternatives.
    """
    for package, name in _names(cls):
        reason = _UNSUPPORTED.get(package) or _UNSUPPORTED_CLASSES.get((package, name))
        if reason is not None:
            raise UnsupportedOptionError(
                f"{name} of {package} cannot update parameters on an XLA device: {reason}. Use an optimizer of "
                "torch.optim; state takes less memory with transformers' Adafactor, and cut by sharding='fsdp'"
            )


def _names(cls: type) -> list[tuple[str, str]]:
    return [(base.__module__.partition(".")[0], base.__name__) for base in cls.__mro__]


__all__ = [
    "EagerOptimizerWarning",
    "check_supported",
    "eager_reason",
    "prepare_for_tracing",
    "prime",
    "register_eager_optimizer",
    "register_state_init",
    "warn_eager",
]
