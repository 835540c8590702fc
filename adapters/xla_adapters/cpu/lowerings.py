"""Convolutions, sums and layer norms, written as XLA:CPU computes them fastest. Values differ in rounding at most.

Convolutions are sums of matrix products where XLA:CPU would compile naive loops (most others go to Eigen):
- Grouped convolutions: the weight gradient is a loop over all pairs of channels, even of different groups. Forward and
  backward of 128 channels in 32 groups, 3 x 3, on 8 x 16 x 16 take more than 1 s; as nine products about 30 ms.
- Kernels with more elements than the input has pixels: XLA swaps the two (`AlgebraicSimplifier`), and Eigen does not
  support the result. 512 channels, 3 x 3, on 8 x 2 x 2 take 170 ms; as products 37. In a ResNet with images of 64
  pixels or fewer these last layers are most of the time.

Sums over the rows of a matrix (gradients of biases and norms) are matrix products with ones. XLA:CPU splits such a sum
into windows (pass `tree_reduction_rewriter`) and compiles each window separately, as a scalar loop. In a GPT-2 of 12
layers that is a third of the compile time and a tenth of the step. Matrix products call Eigen, which is compiled
already.

The input of a layer norm is computed once. XLA fuses producers into each consumer and computes them again there. In
models that normalize after the residual (BERT) each norm's input depends on the previous norm, so fusions reach back to
the first layer. With 12 layers of width 32 they have 600 operations: 30 s of CPU time to compile and 27 ms per step. A
barrier before each norm reduces that to 7 s and 13 ms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch.nn.functional import pad

from xla_adapters.runtime.interface import Runtime

# The most elements of a kernel, since the graph has a product for each. With one channel per group (depthwise), 5 x 5
# gains little and 7 x 7 loses.
_MOST_PLACES, _MOST_PLACES_OF_ONE = 64, 25
_OPERATION = "sum.dim_IntList"
# XLA fuses sums of fewer rows into other operations.
_LEAST_ROWS = 33
# Eigen adds sequentially, XLA in a tree of windows of 32: with more rows the difference in rounding would matter.
_MOST_ROWS = 1 << 16
# Fewer columns do not fill the CPU's vector registers.
_LEAST_COLUMNS = 32
# With one row XLA would compile a vector-matrix product by itself instead of calling Eigen.
_ROWS_OF_ONES = 2
# Without the windows a product takes longer to compile than a sum, and small sums are fast.
_LEAST_ELEMENTS_WITHOUT_WINDOWS = 1 << 17

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


@contextmanager
def sums_as_products(runtime: Runtime, *, cut_by_compiler: bool) -> Iterator[None]:
    """Inside the context, sums over leading dimensions are matrix products where that is faster.

    Only for float32 outside of autocast, and in this thread. Results differ by rounding.

    Args:
        runtime: the runtime, with a single CPU device.
        cut_by_compiler: whether XLA splits sums into windows (its `tree_reduction_rewriter` is on).
    """
    least = 0 if cut_by_compiler else _LEAST_ELEMENTS_WITHOUT_WINDOWS

    def summed(
        stock: Callable[..., torch.Tensor],
        input: torch.Tensor,
        dim: Sequence[int] | None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        rows, columns = _first_and_other(input.shape, dim or ())
        if not (
            _LEAST_ROWS <= rows <= _MOST_ROWS
            and columns >= _LEAST_COLUMNS
            and rows * columns >= least
            and input.dtype == torch.float32
            and dtype in (None, torch.float32)
            # Autocast would multiply in lower precision.
            and not torch.is_autocast_enabled("xla")
        ):
            return stock(input, dim, keepdim, dtype=dtype)
        assert dim
        kept = input.shape[len(dim) :]
        # Torch function modes have already seen this sum; they must not see the product, too.
        with torch._C.DisableTorchFunction():
            ones = torch.ones(_ROWS_OF_ONES, rows, dtype=input.dtype, device=input.device)
            sums = torch.mm(ones, input.reshape(rows, columns))[0]
            return sums.reshape([*([1] * len(dim) if keepdim else []), *kept])

    with runtime.custom_kernels.replaced(_OPERATION, summed):
        yield


def _first_and_other(shape: torch.Size, dims: Sequence[int]) -> tuple[int, int]:
    """Number of elements in the summed dimensions, and in the others; (0, 0) if the summed ones are not the first."""
    each = sorted(dim + len(shape) if dim < 0 else dim for dim in dims)
    # torch raises for dimensions that do not exist or are repeated; leave these to it.
    if not each or each != list(range(len(each))) or len(each) > len(shape):
        return 0, 0
    return math.prod(shape[: len(each)]), math.prod(shape[len(each) :])


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
