"""Parameters stay the same objects when a module is moved to the device, as on other devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

_Place = tuple[dict[str, Any], str]


def keep_parameters_when_moved(device_type: str) -> None:
    """From now on `module.to(device)` keeps its `Parameter` objects and shared tensors, for the rest of the process.

    torch moves a module to CUDA within its parameters. To other devices it makes new ones: an optimizer that was
    created before would update the old ones, and tied weights (`decoder.weight = embedding.weight`) would be two.
    torch's own switch, `torch.__future__.set_swap_module_params_on_conversion`, raises where a parameter cannot be
    kept, e.g. because it has a weak reference. Here its places in the module get the same new parameter then.

    Args:
        device_type: of the device, as in `torch.device.type`.
    """
    original: Any = nn.Module._apply
    if hasattr(original, "of_xla_adapters"):
        return

    @functools.wraps(original)
    def apply(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        places = _places(module, recurse)
        moved: nn.Module = original(module, fn, recurse)
        for old, (first, *others) in places:
            new = first[0].get(first[1])
            # None: a module's own `_apply` has put something else in its place.
            if new is not None and new is not old:
                kept = _kept(old, new, device_type)
                for owner, name in (first, *others):
                    owner[name] = kept
        return moved

    apply.of_xla_adapters = True  # type: ignore[attr-defined]
    nn.Module._apply = apply  # type: ignore[method-assign]


def _places(module: nn.Module, recurse: bool) -> list[tuple[torch.Tensor, list[_Place]]]:
    """The parameters and buffers of a module, each with the dictionaries that hold it.

    `Module._apply` calls itself for its children, which then are moved and compared alone. Tensors that are shared
    between them are compared in the outermost call, and in each of the inner ones that holds several of their places.
    """
    found: dict[int, tuple[torch.Tensor, list[_Place]]] = {}
    for inner in module.modules() if recurse else (module,):
        for tensors in (inner._parameters, inner._buffers):
            for name, tensor in _tensors(tensors):
                found.setdefault(id(tensor), (tensor, []))[1].append((tensors, name))
    return list(found.values())


def _tensors(entries: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, tensor) for name, tensor in entries.items() if isinstance(tensor, torch.Tensor))


def _kept(old: torch.Tensor, new: torch.Tensor, device_type: str) -> torch.Tensor:
    """The old parameter with the new one's value, or the new one, if that is impossible."""
    if not isinstance(old, nn.Parameter) or old.device.type == device_type or new.device.type != device_type:
        return new
    attributes, hooks = dict(vars(old)), old._backward_hooks
    if hooks:
        new._backward_hooks = hooks
    try:
        torch.utils.swap_tensors(old, new)
    except RuntimeError:
        return new
    vars(old).update(attributes)
    return old
