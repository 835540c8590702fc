"""Convolutions as sums of matrix products, where XLA:CPU would compile naive loops (most others go to Eigen).

There are two such cases:
- Grouped convolutions: the weight gradient is a loop over all pairs of channels, even of different groups. Forward and
  backward of 128 channels in 32 groups, 3 x 3, on 8 x 16 x 16 take more than 1 s; as nine products about 30 ms.
- Kernels with more elements than the input has pixels: XLA swaps the two (`AlgebraicSimplifier`), and Eigen does not
  support the result. 512 channels, 3 x 3, on 8 x 2 x 2 take 170 ms; as products 37. In a ResNet with images of 64
  pixels or fewer these last layers are most of the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch.nn.functional import pad

# The most elements of a kernel, since the graph has a product for each. With one channel per group (depthwise), 5 x 5
# gains little and 7 x 7 loses.
_MOST_PLACES, _MOST_PLACES_OF_ONE = 64, 25

Numbers = int | Sequence[int]


def _each(value: Numbers, dims: int) -> list[int]:
    given = [value] if isinstance(value, int) else list(value)
    return given * dims if len(given) == 1 else given


def _as_products(function: Callable[..., Any], dims: int) -> Callable[..., torch.Tensor]:
    """Wraps `torch.conv1d`, `conv2d` or `conv3d`: the same result, as products where that is faster.

    Args:
        function: the torch function.
        dims: its number of spatial dimensions.
    """

    def convolution(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: Numbers = 1,
        padding: str | Numbers = 0,
        dilation: Numbers = 1,
        groups: int = 1,
    ) -> torch.Tensor:
        kernel = tuple(weight.shape[2:])
        places = math.prod(kernel)
        is_loop = groups > 1 or places > math.prod(input.shape[-dims:])
        most = _MOST_PLACES_OF_ONE if weight.shape[1] == 1 else _MOST_PLACES
        if not is_loop or places > most or torch.is_autocast_enabled("xla"):
            result: torch.Tensor = function(input, weight, bias, stride, padding, dilation, groups)
            return result
        steps, spaces = _each(stride, dims), _each(dilation, dims)
        if padding == "same":
            whole = [space * (size - 1) for space, size in zip(spaces, kernel, strict=True)]
            edges = [(total // 2, total - total // 2) for total in whole]
        else:
            edges = [(edge, edge) for edge in _each(0 if isinstance(padding, str) else padding, dims)]
        single = input.ndim == dims + 1
        padded = pad(input[None] if single else input, [edge for pair in reversed(edges) for edge in pair])
        sizes = [
            (length - space * (size - 1) - 1) // step + 1
            for length, space, size, step in zip(padded.shape[2:], spaces, kernel, steps, strict=True)
        ]
        of_each = weight.shape[1]
        outputs = weight.shape[0] // groups
        total: torch.Tensor | None = None
        for place in product(*map(range, kernel)):
            cut = [
                slice(at * space, at * space + (size - 1) * step + 1, step)
                for at, space, size, step in zip(place, spaces, sizes, steps, strict=True)
            ]
            inside: tuple[Any, ...] = (..., *cut)
            here: tuple[Any, ...] = (..., *place)
            window, factor = padded[inside], weight[here]
            if of_each == outputs == 1:
                term = window * factor.reshape(-1, *[1] * dims)
            else:
                split = window.reshape(len(window), groups, of_each, -1)
                term = torch.einsum("bgcl,gdc->bgdl", split, factor.reshape(groups, outputs, of_each))
            total = term if total is None else total + term
        assert total is not None
        result = total.reshape(len(total), -1, *sizes)
        if bias is not None:
            result = result + bias.reshape(-1, *[1] * dims)
        return result[0] if single else result

    return convolution


CONVOLUTIONS: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {
    torch.conv1d: _as_products(torch.conv1d, 1),
    torch.conv2d: _as_products(torch.conv2d, 2),
    torch.conv3d: _as_products(torch.conv3d, 3),
}
