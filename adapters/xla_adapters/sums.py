"""Sums over the rows of a matrix on CPU devices, as gradients of biases and norms are: products with a row of ones.

XLA's compiler for the CPU makes windows of such a sum, which it compiles one by one, alike or not, as loops over
single numbers (`tree_reduction_rewriter`); of a GPT-2 of 12 layers that was a third of the compile and a tenth of the
step. Products are computed by Eigen, whose code is compiled already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from xla_adapters.backend.interface import Backend

_OPERATION = "sum.dim_IntList"
# Fewer are summed inside of other operations' loops.
_LEAST_ROWS = 33
# Eigen adds up in long rows, XLA's windows in pairs of 32: of more numbers the rounding would show.
_MOST_ROWS = 1 << 16
# Fewer do not fill the vectors of the CPU.
_LEAST_COLUMNS = 32
# One row of ones would be no product of two matrices, which XLA compiles by itself, each anew.
_ROWS_OF_ONES = 2
# Where the compiler makes no windows, products are more to compile, and smaller sums are soon done.
_LEAST_ELEMENTS_WITHOUT_WINDOWS = 1 << 17


@contextmanager
def sums_as_products(backend: Backend) -> Iterator[None]:
    """Has sums over the rows of a matrix computed as products, where that is faster; on one CPU device.

    Of single precision, outside of autocast, and in this thread. The result differs by rounding.
    """
    if backend.hardware() != "CPU" or backend.is_spmd():
        yield
        return
    least = 0 if backend.cuts_sums() else _LEAST_ELEMENTS_WITHOUT_WINDOWS

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
            # It would multiply in less precision.
            and not torch.is_autocast_enabled("xla")
        ):
            return stock(input, dim, keepdim, dtype=dtype)
        assert dim
        kept = input.shape[len(dim) :]
        # Who looks on at the calls of a step has seen the sum.
        with torch._C.DisableTorchFunction():
            ones = torch.ones(_ROWS_OF_ONES, rows, dtype=input.dtype, device=input.device)
            sums = torch.mm(ones, input.reshape(rows, columns))[0]
            return sums.reshape([*([1] * len(dim) if keepdim else []), *kept])

    with backend.kernel_replaced(_OPERATION, summed):
        yield


def _first_and_other(shape: torch.Size, dims: Sequence[int]) -> tuple[int, int]:
    """Elements of the dimensions that are summed over, and of the others; (0, 0) if those are not the first ones."""
    each = sorted(dim + len(shape) if dim < 0 else dim for dim in dims)
    # Not those that do not exist, or are named twice, of which torch has an error.
    if not each or each != list(range(len(each))) or len(each) > len(shape):
        return 0, 0
    return math.prod(shape[: len(each)]), math.prod(shape[len(each) :])
