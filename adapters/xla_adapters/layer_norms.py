"""Layer norms whose input is computed once, on a CPU device.

XLA fuses what leads to a value into each operation that reads it, and computes it again there. Where the input of a
norm is the former norm and something new (BERT and all that normalize behind the residual), that goes back to the
first layer: 12 layers of width 32 had fusions of 600 operations, took 30 s of CPU to compile, and 27 ms for a step,
where they take 7 and 13 (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xla_adapters.backend.interface import Backend


def layer_norms(backend: Backend) -> dict[Callable[..., Any], Callable[..., torch.Tensor]]:
    """What to call in place of torch's functions; the same values, and nothing on a device that has no barriers."""
    if not backend.fuses_up_to_barriers():
        return {}

    def gradient_came(gradient: torch.Tensor | None) -> None:
        # Autograd calls hooks without one where nothing comes back.
        if gradient is not None:
            backend.compute_once(gradient)

    def instead_of(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def norm(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            # What functorch wraps has no value of its own.
            if torch._is_functional_tensor(input):
                backend.compute_once(input)
                if input.requires_grad and not input.is_leaf:
                    # The sum of what comes back from the norm and from the path around it.
                    input.register_hook(gradient_came)
            return function(input, *args, **kwargs)

        return norm

    return {function: instead_of(function) for function in (torch.nn.functional.layer_norm, torch.layer_norm)}
