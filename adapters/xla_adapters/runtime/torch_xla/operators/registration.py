"""Puts kernels in place of those that torch_xla has, or lacks: for the rest of the process, or for a while."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.library import Library, fallthrough_kernel, get_kernel

_KEY, _AUTOGRAD_KEY = "XLA", "AutogradXLA"
_Table = Mapping[str, Callable[..., Any]]

# torch's own decompositions, for operators whose backward is in this list as well, or none is needed.
_TORCHS = (
    *("addmv", "vdot", "glu_backward", "huber_loss", "huber_loss_backward", "im2col", "col2im"),
    *("channel_shuffle", "aminmax", "unfold_backward", "logit_backward", "renorm", "sinc", "special_entr"),
    *("special_xlog1py", "tril_indices", "triu_indices"),
    # torch_xla 2.9 has these, with other results for infinities.
    *("log_sigmoid_forward", "log_sigmoid_backward"),
)
# torch composes these of operators that have a backward, and so do torch_xla's kernels. Without an entry for autograd
# torch warns of "silently incorrect behavior" in each backward.
_COMPOSED = ("cross", "diag", "inverse", "kl_div", "logdet", "qr", "selu", "selu_", "std", "std.dim", "svd")
# The same for operators whose backward torch_xla does not have: the decomposition's is used.
_TORCHS_DIFFERENTIABLE = ("multi_margin_loss", "logaddexp", "logaddexp2", "linalg_cross")
# torch_xla's kernels that refuse numbers in tensors of no dimensions on the host, which other devices take.
_REFUSE_HOST_NUMBERS = ("lerp.Tensor", "lerp.Scalar", "mse_loss", "smooth_l1_loss")
# Kernels, of torch_xla or of this folder, that are called by `_with_host_numbers`.
_TAKE_HOST_NUMBERS = frozenset(
    (
        *_REFUSE_HOST_NUMBERS,
        *("clamp.Tensor", "clamp_min.Tensor", "clamp_max.Tensor", "atan2", "xlogy.Tensor", "index_fill.int_Tensor"),
        *("where.self", "masked_fill.Tensor", "floor_divide", "fmax", "fmin", "copysign.Tensor", "heaviside"),
        *("logaddexp", "logaddexp2"),
    )
)


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Kernels by the name of the operator, and by where the dispatcher calls them.

    A kernel "around" another one gets that one as its first argument.

    Attributes:
        differentiable: written with operators that have a backward. The dispatcher calls them before it records the
            call for autograd, and where autograd is left out: below another operator, and in inference mode.
        around_differentiable: the same, around torch_xla's.
        above_autograd: only where autograd is not left out.
        around_above_autograd: the same, around torch's.
        below_autograd: torch's own formulas for gradients call such kernels, or there are none (of integers).
        around_below_autograd: the same, around torch_xla's.
    """

    differentiable: _Table = field(default_factory=dict)
    around_differentiable: _Table = field(default_factory=dict)
    above_autograd: _Table = field(default_factory=dict)
    around_above_autograd: _Table = field(default_factory=dict)
    below_autograd: _Table = field(default_factory=dict)
    around_below_autograd: _Table = field(default_factory=dict)


_library: Library | None = None


def register(tables: Sequence[Kernels]) -> bool:
    """Registers kernels with torch's dispatcher, for the rest of the process.

    Returns:
        Whether it did; it does so once in a process.
    """
    global _library
    if _library is not None:
        return False
    _library = Library("aten", "IMPL")
    with _quietly():
        for name in _TORCHS_DIFFERENTIABLE:
            _register_differentiable(name, _torchs(name))
        for name in _COMPOSED:
            _library.impl(name, fallthrough_kernel, _AUTOGRAD_KEY)
        for name in _TORCHS:
            _register(name, _torchs(name), _KEY)
        for name in _REFUSE_HOST_NUMBERS:
            _put_around(name, _same, _KEY)
        for table in tables:
            _register_table(table)
    return True


def _register_table(table: Kernels) -> None:
    for name, kernel in table.differentiable.items():
        _register_differentiable(name, kernel)
    for name, kernel in table.above_autograd.items():
        _register(name, kernel, _AUTOGRAD_KEY)
    for name, kernel in table.below_autograd.items():
        _register(name, kernel, _KEY)
    for name, around in table.around_differentiable.items():
        _put_around(name, around, _AUTOGRAD_KEY)
        _put_around(name, around, _KEY)
    for name, around in table.around_above_autograd.items():
        _put_around(name, around, _AUTOGRAD_KEY)
    for name, around in table.around_below_autograd.items():
        _put_around(name, around, _KEY)


def _register_differentiable(name: str, kernel: Callable[..., Any]) -> None:
    _register(name, kernel, _AUTOGRAD_KEY)
    _register(name, kernel, _KEY, allow_override=True)


def _register(name: str, kernel: Callable[..., Any], key: str, **options: bool) -> None:
    assert _library is not None
    _library.impl(name, partial(_with_host_numbers, kernel) if name in _TAKE_HOST_NUMBERS else kernel, key, **options)


def _put_around(name: str, kernel: Callable[..., Any], key: str) -> None:
    _register(name, partial(_around, kernel, get_kernel(f"aten::{name}", key)), key, with_keyset=True)


def _around(kernel: Callable[..., Any], stock: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    return kernel(partial(stock.call_boxed, keys), *args, **kwargs)


def _same(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return stock(*args, **kwargs)


def _torchs(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operator: Any = getattr(getattr(torch.ops.aten, packet), overload or "default")
    found: Callable[..., Any] = decomposition_table[operator]
    return found


def _with_host_numbers(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a kernel with its arguments on the device.

    Raises:
        RuntimeError: an argument on the host has dimensions; some kernels of torch_xla fail on it at the end of a step.
    """
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    device = next((tensor.device for tensor in given if tensor.device.type != "cpu"), None)
    if device is None or all(tensor.device.type != "cpu" for tensor in given):
        return kernel(*args, **kwargs)
    if any(tensor.ndim and tensor.device.type == "cpu" for tensor in given):
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {device} and cpu")

    def there(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    return kernel(*map(there, args), **{name: there(value) for name, value in kwargs.items()})


# ---- for a while -------------------------------------------------------------------------------------


@contextmanager
def kernel_replaced(name: str, kernel: Callable[..., torch.Tensor]) -> Iterator[None]:
    """See `CustomKernels.replaced`."""
    if f"aten/{name}/{_KEY}" in torch.library._impls:
        yield
        return
    computed = partial(_computed, kernel, _stock_kernel(name), threading.get_ident())
    library = Library("aten", "IMPL")
    try:
        library.impl(name, computed, _KEY, with_keyset=True)
        yield
    finally:
        library._destroy()


def _computed(kernel: Callable[..., Any], stock: Any, thread: int, keys: Any, *args: Any, **kwargs: Any) -> Any:
    before = partial(stock.call_boxed, keys)
    # The dispatcher has one kernel for all threads.
    return kernel(before, *args, **kwargs) if threading.get_ident() == thread else before(*args, **kwargs)


@cache
def _stock_kernel(name: str) -> Any:
    stock = get_kernel(f"aten::{name}", _KEY)
    library = Library("aten", "IMPL")
    with _quietly():
        library.impl(name, stock.call_boxed, _KEY, with_keyset=True)
    library._destroy()
    return stock


@contextmanager
def _quietly() -> Iterator[None]:
    """torch says once in a process that some kernel is being replaced, which is what is asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*verriding a previously registered kernel", UserWarning)
        yield
