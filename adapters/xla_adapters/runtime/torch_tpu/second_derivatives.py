"""Second derivatives of operators for which torch_tpu 0.2 has an autograd function of its own.

The backward of such a function is not differentiable: under `create_graph` its gradients are constants, so that a
gradient penalty through a cross entropy would be wrong, without an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.library import Library, get_kernel

from xla_adapters.utils.torch_modes import unwrapped

_KEY = "AutogradPrivateUse1"
# Their functions save what they are given, so that a weak reference to it lives as long as a backward is possible.
_LOSSES = (torch.ops.aten.cross_entropy_loss.default, torch.ops.aten.nll_loss_nd.default)
# Their functions have nothing to spare compared with what torch composes.
_COMPOSED = (torch.ops.aten.repeat_interleave.self_int,)

_Gradients = Sequence[torch.Tensor | None]


def mend_second_derivatives(library: Library) -> None:
    """Has their gradients be differentiable where they are asked for with `create_graph`.

    Args:
        library: of "aten", gets the kernels.
    """
    for operator, kernel in (*((op, _differentiable(op)) for op in _LOSSES), *((op, op.decompose) for op in _COMPOSED)):
        library.impl(
            operator.name().partition("::")[2], kernel, _KEY, with_keyset=operator in _LOSSES, allow_override=True
        )


def _differentiable(operator: OpOverload[..., Any]) -> Callable[..., torch.Tensor]:
    """torch_tpu's kernel of an operator; a backward with `create_graph` computes what torch composes instead."""
    former = get_kernel(operator.name(), _KEY)

    def kernel(keys: Any, *args: Any, **options: Any) -> torch.Tensor:
        if any(isinstance(value, torch.Tensor) and unwrapped(value) is not value for value in args):
            # In a transform of `torch.func`, which differentiates the result as often as it likes.
            whole: torch.Tensor = operator.decompose(*args, **options)
            return whole
        result: torch.Tensor = former.call_boxed(keys, *args, **options)
        node = result.grad_fn
        if node is None:
            return result
        given = [weakref.ref(value) if isinstance(value, torch.Tensor) else value for value in args]
        edges = [function is not None for function, _ in node.next_functions]

        def composed(gradients: _Gradients, of_results: Sequence[torch.Tensor]) -> _Gradients | None:
            if not torch.is_grad_enabled():
                return None
            values = [value() if isinstance(value, weakref.ref) else value for value in given]
            inputs = [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
            if len(inputs) != sum(edges):
                raise RuntimeError(f"{operator.name()}: its arguments are gone, so it has no second derivative")
            # A function mode would call the operator in place of what torch composes, and so come here again.
            with torch._C.DisableTorchFunction():
                again = operator.decompose(*values, **options)
            found = iter(torch.autograd.grad(again, inputs, of_results, create_graph=True))
            return tuple(next(found) if edge else None for edge in edges)

        node.register_hook(composed)
        return result

    return kernel
