"""Sums over the rows of a matrix on CPU devices (gradients of biases and norms), computed as matrix products with ones.

XLA:CPU splits such a sum into windows (pass `tree_reduction_rewriter`) and compiles each window separately, as a scalar
loop. In a GPT-2 of 12 layers that is a third of the compile time and a tenth of the step. Matrix products call Eigen,
which is compiled already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from xla_adapters.runtime.interface import Runtime

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
