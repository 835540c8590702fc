"""Arguments that do not go together: tensors of different dtypes, and tensors of the host and of the device.

Products of different dtypes fail in a step as they do on the CPU. The device would accept some of them, and fail others
when the graph is compiled, without the line of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from xla_adapters.errors import HostTensorError
from xla_adapters.utils.location import current_location
from xla_adapters.utils.nested_values import replaced, tensors_in
from xla_adapters.utils.torch_modes import device_type

_Tensor = torch.Tensor
_NAMES = ("matmul", "mm", "bmm", "mv", "dot", "vdot", "inner", "addmm", "addmv", "addbmm", "baddbmm")
_IN_PLACE = ("addmm_", "addmv_", "addbmm_", "baddbmm_")
# Of a small input on the host torch computes them there.
_CONVOLUTIONS = frozenset(
    getattr(module, f"{name}{rank}d")
    for module in (functional, torch)
    for name in ("conv", "conv_transpose")
    for rank in (1, 2, 3)
)
_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *(getattr(_Tensor, name) for name in (*_NAMES, *_IN_PLACE)),
    *(getattr(torch, name) for name in _NAMES),
    *_CONVOLUTIONS,
    _Tensor.__matmul__,
    _Tensor.__rmatmul__,
    torch.einsum,
    torch.tensordot,
    torch.chain_matmul,
    functional.linear,
    functional.bilinear,
    functional.scaled_dot_product_attention,
)
# How many of the tensors of a call have to agree: the mask of an attention comes after them, and may be of booleans.
PRODUCTS = dict.fromkeys(_FUNCTIONS, 3) | {functional.multi_head_attention_forward: 4}


def refuse_mixed_dtypes(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises what torch raises on the CPU for a product of tensors of different dtypes.

    Args:
        function: of torch, about to be called on the device.
        args, kwargs: its arguments; not changed.

    Raises:
        HostTensorError: a convolution of a tensor on the host with weights on the device.
        RuntimeError: torch's own. Under autocast torch makes the dtypes equal, and nothing is raised.
    """
    compared = PRODUCTS.get(function)
    if compared is None:
        return
    given = [*islice(tensors_in((args, kwargs)), compared)]
    if function in _CONVOLUTIONS and (mixed := host_tensor_error(function, args, kwargs, device_type())) is not None:
        raise mixed
    if len({tensor.dtype for tensor in given}) < 2 or any(tensor.device.type != device_type() for tensor in given):
        return
    if torch.is_autocast_enabled(device_type()):
        return
    # One number in the shape of each argument: torch looks at the dtypes before it computes.
    with _disable_current_modes(), torch.no_grad():
        function(*replaced(args, _on_the_host), **replaced(kwargs, _on_the_host))


def _on_the_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def host_tensor_error(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str
) -> HostTensorError | None:
    """The error of a call whose arguments are on the host and on the device; None if they are not.

    Args:
        function: of torch, which raised.
        args, kwargs: its arguments.
        device_type: of the device, as in `torch.device.type`.
    """
    given = list(_tensors([*enumerate(args, 1), *kwargs.items()], ""))
    on_host = [(name, tensor) for name, tensor in given if tensor.device.type == "cpu"]
    on_device = [tensor for _, tensor in given if tensor.device.type == device_type]
    if not on_host or not on_device:
        return None
    named = ", ".join(f"{name} {_described(tensor)}" for name, tensor in on_host[:3])
    more = f" and {len(on_host) - 3} more" if len(on_host) > 3 else ""
    place = current_location()
    where = "" if place is None else f"\n  where: {place.called_from or place}"
    called = getattr(function, "__name__", str(function))
    return HostTensorError(
        f"{called} got tensors on the host together with tensors on the device: {named}{more}{where}\n"
        f"  what to do: move them with .to({str(on_device[0].device)!r}), or make them there (device=...); the tensors "
        "of a module move with module.to(device) if they are parameters or buffers"
    )


def _tensors(values: list[tuple[Any, Any]], within: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in values:
        called = within or (f"argument {name}" if isinstance(name, int) else str(name))
        if isinstance(value, torch.Tensor):
            yield called, value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(list(enumerate(value, 1)), called)


def _described(tensor: torch.Tensor) -> str:
    return f"({str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)})"
