"""Functions of torch and safetensors that are replaced as the runtime starts: they treat the device as others.

Parameters stay the same objects when a module is moved to the device and can be parametrized there, backward passes
need no threads of their own, attention masks are not read from the device, and safetensors saves what is on it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import safetensors.torch
import torch
from torch import nn
from torch.nn.utils import parametrize

from xla_adapters.runtime.interface import Runtime
from xla_adapters.utils.nested_values import Identity, identity
from xla_adapters.utils.torch_modes import device_type

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


def run_backward_where_it_is_called() -> None:
    """From now on backward passes run in the thread that calls them, for the rest of the process.

    At its first backward pass in a process torch makes a queue for each device that it then knows. If that was before
    the runtime has started, a pass with tensors of an XLA device would end in an internal error. Backward passes that
    stay in their thread need no queue; see `torch.autograd.set_multithreading_enabled`.
    """
    run: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    if hasattr(run, "of_xla_adapters"):
        return

    @functools.wraps(run)
    def run_here(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return run(*args, **kwargs)

    run_here.of_xla_adapters = True  # type: ignore[attr-defined]
    torch.autograd._engine_run_backward = run_here  # type: ignore[attr-defined]


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


# ---- parametrizations -----------------------------------------------------------------------------


def parametrize_by_copying() -> None:
    """From now on `torch.nn.utils.parametrize` copies values into parameters on the device.

    It gives them the memory of another tensor (`Tensor.set_`), after which torch lets nobody write to such a one.
    """
    original = parametrize._maybe_set
    if hasattr(original, "of_xla_adapters"):
        return

    @functools.wraps(original)
    def maybe_set(dest: torch.Tensor, src: torch.Tensor) -> None:
        if not _is_on_device(dest):
            original(dest, src)
        elif dest.shape == src.shape:
            with torch.no_grad():
                dest.copy_(src)
        else:
            dest.data = src.detach().clone()

    maybe_set.of_xla_adapters = True  # type: ignore[attr-defined]
    parametrize._maybe_set = maybe_set


# ---- attention masks -------------------------------------------------------------------------------


def use_attention_masks_as_given() -> None:
    """From now on `nn.TransformerEncoder` and `nn.TransformerDecoder` do not compare a mask with the causal one.

    torch reads the mask, to replace a causal one by a flag, from which it makes the same mask again. With the mask as
    it was given the results are the same. Callers that give `is_causal` are answered as before.
    """
    library: Any = nn.modules.transformer
    original = library._detect_is_causal_mask
    if hasattr(original, "of_xla_adapters"):
        return

    @functools.wraps(original)
    def detect(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        if is_causal is None and _is_on_device(mask):
            return False
        return bool(original(mask, is_causal, size))

    detect.of_xla_adapters = True  # type: ignore[attr-defined]
    library._detect_is_causal_mask = detect


# ---- safetensors ----------------------------------------------------------------------------------


_Weights = dict[str, torch.Tensor]


def weights_on_host(weights: Mapping[str, Any], runtime: Runtime) -> dict[str, Any]:
    """Copies the tensors of a state dict that are on the device to the host, in one transfer.

    Args:
        weights: by name; values that are no tensors of the device stay as they are.
        runtime: the runtime.

    Returns:
        A new dict. Tied weights are one tensor there, too.
    """
    on_device = {name: identity(value) for name, value in weights.items() if _is_on_device(value)}
    if not on_device:
        return dict(weights)
    found = {key: weights[name] for name, key in on_device.items()}
    copies = dict(zip(found, runtime.transfers.to_host(list(found.values())), strict=True))
    return {name: copies[on_device[name]] if name in on_device else value for name, value in weights.items()}


def save_from_device(runtime: Runtime) -> None:
    """From now on safetensors saves tensors of the device, for the rest of the process.

    safetensors finds tied weights by the addresses of their memory, and refuses a tensor without one.

    Args:
        runtime: copies the tensors to the host.
    """
    library: Any = safetensors.torch
    if hasattr(library._find_shared_tensors, "of_xla_adapters"):
        return
    find, is_complete, flatten = library._find_shared_tensors, library._is_complete, library._flatten_as_ptr

    @functools.wraps(find)
    def find_shared(weights: _Weights) -> list[set[str]]:
        shared: dict[Identity, set[str]] = {}
        for name, value in weights.items():
            if _is_on_device(value):
                shared.setdefault(identity(value), set()).add(name)
        host = {name: value for name, value in weights.items() if not _is_on_device(value)}
        return [*find(host), *shared.values()]

    @functools.wraps(is_complete)
    def covers_its_storage(tensor: torch.Tensor) -> bool:
        return _is_on_device(tensor) or is_complete(tensor)

    @functools.wraps(flatten)
    def flatten_from_host(weights: _Weights, *rest: Any) -> Any:
        if any(map(_is_on_device, weights.values())):
            # Of copies on the host it would not find which are one tensor on the device.
            library._evaluate_tensors_for_save(weights)
            weights = weights_on_host(weights, runtime)
        return flatten(weights, *rest)

    find_shared.of_xla_adapters = True  # type: ignore[attr-defined]
    library._find_shared_tensors = find_shared
    library._is_complete = covers_its_storage
    library._flatten_as_ptr = flatten_from_host


def _is_on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == device_type()
