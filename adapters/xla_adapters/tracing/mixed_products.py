"""`refuse_mixed_dtypes`: products of tensors of different dtypes fail in a step as they do on the CPU.

The device would accept some of them, and fail others when the graph is compiled, without the line of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from xla_adapters.utils.nested_values import replaced, tensors_in
from xla_adapters.utils.torch_modes import device_type

_Tensor = torch.Tensor
_NAMES = ("matmul", "mm", "bmm", "mv", "dot", "vdot", "inner", "addmm", "addmv", "addbmm", "baddbmm")
_IN_PLACE = ("addmm_", "addmv_", "addbmm_", "baddbmm_")
_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *(getattr(_Tensor, name) for name in (*_NAMES, *_IN_PLACE)),
    *(getattr(torch, name) for name in _NAMES),
    *(getattr(functional, f"{name}{rank}d") for name in ("conv", "conv_transpose") for rank in (1, 2, 3)),
    *(getattr(torch, f"{name}{rank}d") for name in ("conv", "conv_transpose") for rank in (1, 2, 3)),
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
        RuntimeError: torch's own. Under autocast torch makes the dtypes equal, and nothing is raised.
    """
    compared = PRODUCTS.get(function)
    if compared is None:
        return
    given = [*islice(tensors_in((args, kwargs)), compared)]
    if len({tensor.dtype for tensor in given}) < 2 or any(tensor.device.type != device_type() for tensor in given):
        return
    if torch.is_autocast_enabled(device_type()):
        return
    # One number in the shape of each argument: torch looks at the dtypes before it computes.
    with _disable_current_modes(), torch.no_grad():
        function(*replaced(args, _on_the_host), **replaced(kwargs, _on_the_host))


def _on_the_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
