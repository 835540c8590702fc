"""Layer norms whose input is computed once, on CPU devices.

XLA fuses producers into each consumer and computes them again there. In models that normalize after the residual (BERT)
each norm's input depends on the previous norm, so fusions reach back to the first layer. With 12 layers of width 32
they have 600 operations: 30 s of CPU time to compile and 27 ms per step. A barrier before each norm reduces that to 7 s
and 13 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xla_adapters.runtime.interface import Runtime


def layer_norms(runtime: Runtime) -> dict[Callable[..., Any], Callable[..., torch.Tensor]]:
    """Replacements for torch's layer norm functions, by function; the values are the same.

    Args:
        runtime: the runtime, whose compiler must keep barriers (`CPUTuning.fuses_up_to_barriers`).
    """

    def gradient_came(gradient: torch.Tensor | None) -> None:
        # Autograd passes None where no gradient arrives.
        if gradient is not None:
            runtime.custom_kernels.compute_once(gradient)

    def instead_of(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def norm(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            # Tensors wrapped by functorch transforms have no value to put a barrier on.
            if torch._is_functional_tensor(input):
                runtime.custom_kernels.compute_once(input)
                if input.requires_grad and not input.is_leaf:
                    # The gradient here is the sum of the norm's and of the residual path's.
                    input.register_hook(gradient_came)
            return function(input, *args, **kwargs)

        return norm

    return {function: instead_of(function) for function in (torch.nn.functional.layer_norm, torch.layer_norm)}
