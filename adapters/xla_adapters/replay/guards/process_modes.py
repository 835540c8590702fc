"""The switches and modes of the process that change what is traced."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules import module as nn_module
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from xla_adapters.runtime import get_runtime

_GLOBAL_HOOKS = (
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
)


def environment() -> tuple[Any, ...]:
    """The present switches. Under other ones the same step may be another graph."""
    attention = torch.backends.cuda
    devices = (get_runtime().device.torch_device().type, "cpu", "cuda")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *map(torch.is_autocast_enabled, devices),
        *map(torch.get_autocast_dtype, devices),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.is_anomaly_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        attention.math_sdp_enabled(),
        attention.flash_sdp_enabled(),
        attention.mem_efficient_sdp_enabled(),
        attention.cudnn_sdp_enabled(),
        tuple(str(mode.device) for mode in _function_modes() if type(mode) is DeviceContext),
        tuple(key for name in _GLOBAL_HOOKS for key in getattr(nn_module, name)),
    )


def unknown_mode() -> str | None:
    """A mode whose effect on a trace is not known, in words; None if none is on."""
    modes = [*_function_modes(), *_get_current_dispatch_mode_stack()]
    unknown = next((mode for mode in modes if type(mode) is not DeviceContext), None)
    if unknown is not None:
        return f"{type(unknown).__qualname__} is on, which sees each operator of a traced step"
    if torch.is_inference_mode_enabled():
        return "torch.inference_mode is on, in which a replay has no tensors for its results"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "hooks on saved tensors are on (torch.autograd.graph.saved_tensors_hooks)"
    if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
        return "hooks on saved tensors are forbidden (torch.autograd.graph.disable_saved_tensors_hooks)"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func is under way"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation is on"
    if any(not getattr(hook, "only_tensors", False) for name in _GLOBAL_HOOKS for hook in _hooks(name)):
        return "there is a hook on all modules, whose Python a replay would leave out"
    return None


def _function_modes() -> list[TorchFunctionMode]:
    """The modes that a trace would pass through and that may change it."""
    return [mode for mode in _get_current_function_mode_stack() if not getattr(mode, "only_looks", False)]


def _hooks(name: str) -> list[Any]:
    hooks: dict[int, Any] = getattr(nn_module, name)
    return [hook for hook in hooks.values() if not (getattr(hook, "__module__", None) or "").startswith("xla_adapters")]
