"""Batch norms of values whose mean is far from zero, and the layer, group and instance norms that torch makes of them.

XLA's operation takes the mean of the squares less the square of the mean for the variance, which is wrong by a tenth
where the mean is a thousand times the deviation (float32): a column of years, a temperature in kelvin.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# Along a dimension.
_FEW = 8
_Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _batch_norm(
    stock: Callable[..., _Tensors],
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    *factors: float,
) -> _Tensors:
    """`native_batch_norm` of what is left when about the mean of each channel is subtracted."""
    # Less precise values have no digits left for a deviation that small, and would be rounded once more.
    if not training or running_mean is not None or input.dtype.itemsize < 4 or not input.numel():
        return stock(input, weight, bias, running_mean, running_var, training, *factors)
    shift = _about_the_mean(input)
    result, mean, inverse_deviation = stock(input - shift, weight, bias, None, None, training, *factors)
    return result, mean + shift.reshape(-1).to(mean.dtype), inverse_deviation


def _about_the_mean(input: torch.Tensor) -> torch.Tensor:
    """Of a few values of each channel, so that the others need not be read twice."""
    inner = [slice(1)] * (input.ndim - 3) + [slice(_FEW)] * (input.ndim > 2)
    few = input[(slice(_FEW), slice(None), *inner)]
    return few.mean([dim for dim in range(input.ndim) if dim != 1], keepdim=True)


# Kernels whose first argument is torch_xla's own.
AROUND_STOCK: dict[str, Callable[..., _Tensors]] = {"native_batch_norm": _batch_norm}
