"""Inputs of no dimensions or of no elements, which torch_xla 2.9 refuses ("Value out of range").

torch takes a tensor of no dimensions for one of a single dimension with one element. A reduction over `dim=()` is one
over all dimensions, where torch_xla returns the values as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table

_Stock = Callable[..., Any]
_ALONG_A_DIMENSION = (
    *("prod.dim_int", "topk", "kthvalue", "sort", "sort.stable"),
    *("any.dim", "any.dims", "all.dim", "all.dims", "flip", "_softmax", "_log_softmax"),
)
# `sum`, which has a kernel for CPU devices, is lowered in steps; see `xla_adapters.lowerings`.
_REDUCTIONS = ("std.correction", "var.correction", "std_mean.correction", "var_mean.correction")

_SCATTERS = ("scatter.src", "scatter.value", "scatter.reduce", "scatter.value_reduce", "scatter_add")


def _with_a_dimension(stock: _Stock, self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Along a dimension; of a tensor without one, the results have none either."""
    if self.ndim:
        return stock(self, *args, **kwargs)
    results = stock(self.reshape(1), *args, **kwargs)
    return results.reshape(()) if isinstance(results, torch.Tensor) else tuple(one.reshape(()) for one in results)


def reduced(stock: _Stock, self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Along dimensions, which are the first of the other arguments; all if there are none."""
    if not self.ndim:
        return _with_a_dimension(stock, self, *args, **kwargs)
    if args and args[0] is not None and not args[0]:
        args = (list(range(self.ndim)), *args[1:])
    return stock(self, *args, **kwargs)


def _vector_norm(stock: _Stock, self: torch.Tensor, ord: float = 2, *args: Any, **kwargs: Any) -> Any:
    """`linalg_vector_norm`."""
    return reduced(lambda values, *rest, **others: stock(values, ord, *rest, **others), self, *args, **kwargs)


def _backward_with_a_dimension(
    stock: _Stock, grad_output: torch.Tensor, output: torch.Tensor, *args: Any
) -> torch.Tensor:
    """Of `softmax` and `log_softmax`."""
    if output.ndim:
        result: torch.Tensor = stock(grad_output, output, *args)
        return result
    one: torch.Tensor = stock(grad_output.reshape(1), output.reshape(1), *args)
    return one.reshape(())


def _one_loss(stock: _Stock, self: torch.Tensor, target: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`nll_loss_forward`: of a single sample without a batch, torch_xla's own ends the process."""
    if self.ndim > 1:
        found: tuple[torch.Tensor, torch.Tensor] = stock(self, target, *args)
        return found
    loss, weight = stock(self.reshape(1, -1), target.reshape(1), *args)
    return loss.reshape(()), weight


def _one_loss_backward(
    stock: _Stock,
    grad_output: torch.Tensor,
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    *args: Any,
) -> torch.Tensor:
    if self.ndim > 1:
        result: torch.Tensor = stock(grad_output, self, target, weight, reduction, *args)
        return result
    gradient = grad_output if reduction else grad_output.reshape(1)
    one: torch.Tensor = stock(gradient, self.reshape(1, -1), target.reshape(1), weight, reduction, *args)
    return one.reshape(self.shape)


def _cumulative(stock: _Stock, self: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`cumsum` and `cumprod`, in a dtype that holds the sums: torch_xla's own adds up in that of the input."""
    whole = not (self.is_floating_point() or self.is_complex())
    dtype = dtype or (torch.int64 if whole else self.dtype)
    if self.numel() == 0:
        return torch.zeros_like(self, dtype=dtype)
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    result: torch.Tensor = _with_a_dimension(stock, self.to(wide), dim, dtype=wide)
    return result.to(dtype)


def _gather(
    stock: _Stock, self: torch.Tensor, dim: int, index: torch.Tensor, *, sparse_grad: bool = False
) -> torch.Tensor:
    """Without elements the index may have any number of dimensions."""
    if index.numel() == 0:
        return torch.zeros(index.shape, dtype=self.dtype, device=self.device)
    rows, positions = (one if one.ndim else one.reshape(1) for one in (self, index))
    result: torch.Tensor = stock(rows, dim, positions, sparse_grad=sparse_grad)
    return result if index.ndim else result.reshape(())


def _index_select(stock: _Stock, self: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    index = index if index.ndim else index.reshape(1)
    result: torch.Tensor = _with_a_dimension(stock, self, dim, index)
    return result


def _index_fill(stock: _Stock, self: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> torch.Tensor:
    if self.ndim:
        result: torch.Tensor = stock(self, dim, index, value)
        return result
    return torch.zeros_like(self) + value if index.numel() else self.clone()


def _scatter(
    stock: _Stock, self: torch.Tensor, dim: int, index: torch.Tensor, source: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """`scatter`, `scatter_add` and `scatter_reduce`; the source may be a number."""
    if index.numel() == 0:
        return self.clone()
    rows, positions = (one if one.ndim else one.reshape(1) for one in (self, index))
    if isinstance(source, torch.Tensor):
        source = source if source.ndim else source.reshape(1)
    elif positions.shape[dim] > rows.shape[dim]:
        # torch_xla cannot write a number by an index that is longer than the tensor.
        values = torch.full(positions.shape, source, dtype=rows.dtype, device=rows.device)
        return torch.scatter(self, dim, index, values.reshape(index.shape))
    result: torch.Tensor = stock(rows, dim, positions, source, *args, **kwargs)
    return result if self.ndim else result.reshape(())


def _squeeze(stock: _Stock, self: torch.Tensor, dim: Any) -> torch.Tensor:
    """`squeeze_copy`, of which `squeeze` is made."""
    return stock(self, dim) if self.ndim else self.clone()


def _roll(stock: _Stock, self: torch.Tensor, *args: Any) -> torch.Tensor:
    """Of no elements, torch_xla's own ends the process."""
    result: torch.Tensor = _with_a_dimension(stock, self, *args) if self.numel() else self.clone()
    return result


def _repeat(stock: _Stock, self: torch.Tensor, repeats: Sequence[int]) -> torch.Tensor:
    if all(repeats):
        result: torch.Tensor = stock(self, repeats)
        return result
    sizes = [1] * (len(repeats) - self.ndim) + list(self.shape)
    shape = [size * times for size, times in zip(sizes, repeats, strict=True)]
    return torch.zeros(shape, dtype=self.dtype, device=self.device)


def _random_permutation(stock: _Stock, n: int, **options: Any) -> torch.Tensor:
    """`randperm`."""
    result: torch.Tensor = torch.arange(n, **options) if n < 2 else stock(n, **options)
    return result


def _sum_of_numbers(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`nansum`: torch's own decomposition, which asks also integers whether they are NaN."""
    decomposed = decomposition_table[torch.ops.aten.nansum.default] if self.is_floating_point() else torch.sum
    result: torch.Tensor = _with_a_dimension(decomposed, self, *args, **kwargs)
    return result


KERNELS: dict[str, Callable[..., Any]] = {
    "nansum": _sum_of_numbers,
}
# Kernels whose first argument is torch_xla's own.
AROUND_STOCK: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_ALONG_A_DIMENSION, _with_a_dimension),
    **dict.fromkeys(_REDUCTIONS, reduced),
    "linalg_vector_norm": _vector_norm,
    **dict.fromkeys(("index_fill.int_Scalar", "index_fill.int_Tensor"), _index_fill),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _backward_with_a_dimension),
    "nll_loss_forward": _one_loss,
    "nll_loss_backward": _one_loss_backward,
    **dict.fromkeys(("cumsum", "cumprod"), _cumulative),
    "gather": _gather,
    "index_select": _index_select,
    **dict.fromkeys(_SCATTERS, _scatter),
    **dict.fromkeys(("squeeze_copy.dim", "squeeze_copy.dims"), _squeeze),
    "roll": _roll,
    "repeat": _repeat,
    "randperm": _random_permutation,
}
