"""`register_kernels`: puts kernels in place of those that torch_xla has, or lacks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.library import Library, fallthrough_kernel, get_kernel

from xla_adapters.runtime.torch_xla.operators import (
    activations,
    comparisons,
    composed,
    determinants,
    dimensions,
    dtypes,
    elementwise,
    embeddings,
    extremes,
    few_elements,
    frozen_norms,
    host_numbers,
    integers,
    maximum_pooling,
    medians,
    padding,
    pooling,
    promotions,
    recurrent,
    remainders,
    resizing,
    sampling,
    scattering,
    sequences,
    sequences_of_numbers,
    slices,
    variances,
)
from xla_adapters.runtime.torch_xla.operators.host_numbers import TAKE_HOST_NUMBERS, with_host_numbers

# Written with operators that have a backward; the dispatcher looks there before it records the call for autograd.
_DIFFERENTIABLE: Mapping[str, Callable[..., Any]] = {
    **resizing.KERNELS,
    **pooling.KERNELS,
    **sampling.KERNELS,
    **elementwise.KERNELS,
    **sequences.DIFFERENTIABLE,
    **composed.DIFFERENTIABLE,
    **medians.DIFFERENTIABLE,
    **recurrent.KERNELS,
}
_AROUND_DIFFERENTIABLE: Mapping[str, Callable[..., Any]] = {
    **pooling.AROUND_STOCK,
    **maximum_pooling.AROUND_STOCK,
    **padding.AROUND_STOCK,
    **promotions.AROUND_DIFFERENTIABLE,
}
_ABOVE_AUTOGRAD: Mapping[str, Callable[..., Any]] = {
    **embeddings.KERNELS,
    **frozen_norms.KERNELS,
    **elementwise.AUTOGRAD_KERNELS,
}
_AROUND_AUTOGRAD: Mapping[str, Callable[..., Any]] = {
    **frozen_norms.AROUND_STOCK,
    **determinants.AROUND_STOCK,
    **extremes.AROUND_AUTOGRAD,
    **composed.AROUND_AUTOGRAD,
}
# Integers have no gradients, and torch's own formulas for those of the others call such kernels.
_BELOW_AUTOGRAD: Mapping[str, Callable[..., Any]] = {
    **integers.KERNELS,
    **remainders.KERNELS,
    **extremes.KERNELS,
    **activations.KERNELS,
    **sequences.KERNELS,
    **scattering.KERNELS,
    **few_elements.KERNELS,
    **composed.KERNELS,
    **medians.KERNELS,
    **dtypes.KERNELS,
}
_AROUND_BELOW_AUTOGRAD: Mapping[str, Callable[..., Any]] = {
    **integers.AROUND_STOCK,
    **comparisons.AROUND_STOCK,
    **dimensions.AROUND_STOCK,
    **slices.AROUND_STOCK,
    **few_elements.AROUND_STOCK,
    **maximum_pooling.BACKWARD_AROUND_STOCK,
    **scattering.AROUND_STOCK,
    **composed.AROUND_STOCK,
    **host_numbers.AROUND_STOCK,
    **determinants.AROUND_STOCK_BELOW_AUTOGRAD,
    **dtypes.AROUND_STOCK,
    **promotions.AROUND_STOCK,
    **sequences_of_numbers.AROUND_STOCK,
    **extremes.AROUND_STOCK,
    **activations.AROUND_STOCK,
    **variances.AROUND_STOCK,
}
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
_TORCHS_DIFFERENTIABLE = (
    "multi_margin_loss",
    "logaddexp",
    "logaddexp2",
    "linalg_cross",
)

_library: Library | None = None


def register_kernels() -> None:
    """Registers the kernels with torch's dispatcher, for the rest of the process."""
    global _library
    if _library is not None:
        return
    _library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        # torch says once in a process that some kernel is being replaced, which is what is asked for.
        warnings.filterwarnings("ignore", "(?s).*verriding a previously registered kernel", UserWarning)
        for name, kernel in (*_DIFFERENTIABLE.items(), *((name, _torchs(name)) for name in _TORCHS_DIFFERENTIABLE)):
            _register(name, kernel, "AutogradXLA")
            # Where autograd is left out: below another operator, and in inference mode.
            _register(name, kernel, "XLA", allow_override=True)
        for name, kernel in _ABOVE_AUTOGRAD.items():
            _register(name, kernel, "AutogradXLA")
        for name in _COMPOSED:
            _library.impl(name, fallthrough_kernel, "AutogradXLA")
        for name in _TORCHS:
            _register(name, _torchs(name), "XLA")
        for name, kernel in _BELOW_AUTOGRAD.items():
            _register(name, kernel, "XLA")
        for name, around in _AROUND_DIFFERENTIABLE.items():
            _put_around(name, around, "AutogradXLA")
            _put_around(name, around, "XLA")
        for name, around in _AROUND_AUTOGRAD.items():
            _put_around(name, around, "AutogradXLA")
        for name, around in _AROUND_BELOW_AUTOGRAD.items():
            _put_around(name, around, "XLA")
    recurrent.complete_gru()


def _register(name: str, kernel: Callable[..., Any], key: str, **options: bool) -> None:
    assert _library is not None
    _library.impl(name, partial(with_host_numbers, kernel) if name in TAKE_HOST_NUMBERS else kernel, key, **options)


def _put_around(name: str, kernel: Callable[..., Any], key: str) -> None:
    _register(name, partial(_around, kernel, get_kernel(f"aten::{name}", key)), key, with_keyset=True)


def _around(kernel: Callable[..., Any], stock: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    return kernel(partial(stock.call_boxed, keys), *args, **kwargs)


def _torchs(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operator: Any = getattr(getattr(torch.ops.aten, packet), overload or "default")
    found: Callable[..., Any] = decomposition_table[operator]
    return found
