"""Reads and writes at indices: slices, diagonals, gathers, scatters, sorted sequences, embeddings.

What torch_xla 2.9 does otherwise:
- It refuses slices that begin before the first element (`x[-100:]` of 16; "Value out of range"), and tensors of no
  dimensions or of no elements.
- Along some dimensions or strides it reads and writes elsewhere.
- It has no means of what is written to one place, and no `include_self=False`.
- It searches in sorted sequences on the host.
- It has no kernels for embeddings with `max_norm=` and `sparse=`, and for bags of embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from xla_adapters.errors import warn_of_dense_gradients
from xla_adapters.runtime.torch_xla.operators.reductions import with_a_dimension
from xla_adapters.runtime.torch_xla.operators.registration import Kernels

_Stock = Callable[..., Any]
_SCATTERS = ("scatter.src", "scatter.value", "scatter.reduce", "scatter.value_reduce", "scatter_add")
_SUM, _MEAN, _MAX = range(3)


# ---- slices and diagonals -------------------------------------------------------------------------


def _slice(
    stock: Callable[..., torch.Tensor],
    self: torch.Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> torch.Tensor:
    """`slice` and `slice_copy`; bounds before the first element are the first one."""
    return stock(self, dim, *_clamped(self, dim, start, end), step)


def _slice_scatter(
    stock: Callable[..., torch.Tensor],
    self: torch.Tensor,
    src: torch.Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> torch.Tensor:
    """`slice_scatter`, which writes through what `slice` gives."""
    return stock(self, src, dim, *_clamped(self, dim, start, end), step)


def _slice_backward(
    stock: Callable[..., torch.Tensor],
    grad_output: torch.Tensor,
    input_sizes: list[int],
    dim: int,
    start: int,
    end: int,
    step: int,
) -> torch.Tensor:
    size = input_sizes[dim]
    return stock(grad_output, input_sizes, dim, max(start, -size), max(end, -size), step)


def _clamped(tensor: torch.Tensor, dim: int, *bounds: int | None) -> list[int | None]:
    size = tensor.shape[dim] if tensor.ndim else 0
    return [None if bound is None else max(bound, -size) for bound in bounds]


def _diagonal(
    stock: Callable[..., torch.Tensor], self: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> torch.Tensor:
    """`diagonal`: right with the last two dimensions only."""
    order = _with_these_last(self.ndim, dim1, dim2)
    if sorted(order[-2:]) == [self.ndim - 2, self.ndim - 1]:
        return stock(self, offset, dim1, dim2)
    return stock(torch.permute_copy(self, order), offset, self.ndim - 2, self.ndim - 1)


def _diagonal_scatter(
    stock: Callable[..., torch.Tensor],
    self: torch.Tensor,
    src: torch.Tensor,
    offset: int = 0,
    dim1: int = 0,
    dim2: int = 1,
) -> torch.Tensor:
    """`diagonal_scatter`, which writes through what `diagonal` gives."""
    order = _with_these_last(self.ndim, dim1, dim2)
    if sorted(order[-2:]) == [self.ndim - 2, self.ndim - 1]:
        return stock(self, src, offset, dim1, dim2)
    written = stock(torch.permute_copy(self, order), src, offset, self.ndim - 2, self.ndim - 1)
    return torch.permute_copy(written, [order.index(dim) for dim in range(self.ndim)])


def _with_these_last(rank: int, dim1: int, dim2: int) -> list[int]:
    last = [dim1 % rank, dim2 % rank]
    return [dim for dim in range(rank) if dim not in last] + last


def _as_strided_scatter(
    stock: Callable[..., torch.Tensor],
    self: torch.Tensor,
    src: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> torch.Tensor:
    """`as_strided_scatter`, of which the backward of `as_strided` is made, by the positions of the elements."""
    positions = torch.full((), storage_offset or 0, dtype=torch.long, device=self.device)
    for length, step in zip(size, stride, strict=True):
        positions = positions.unsqueeze(-1) + torch.arange(length, device=self.device) * step
    flat = torch.scatter(self.reshape(-1), 0, positions.reshape(-1), src.reshape(-1))
    return flat.reshape(self.shape)


def _unfold(self: torch.Tensor, dimension: int, size: int, step: int) -> torch.Tensor:
    """`unfold` below the level where it is a view: windows along a dimension, whose elements are the last dimension."""
    if self.ndim == 0:
        return self.expand(size).clone()
    dim = dimension % self.ndim
    count = (self.shape[dim] - size) // step + 1
    starts = torch.arange(count, device=self.device) * step
    places = starts.unsqueeze(1) + torch.arange(size, device=self.device)
    chosen = torch.index_select(self, dim, places.reshape(-1))
    windows = chosen.reshape(*self.shape[:dim], count, size, *self.shape[dim + 1 :])
    return torch.permute_copy(windows, [*range(dim + 1), *range(dim + 2, windows.ndim), dim + 1])


# ---- reads by an index ----------------------------------------------------------------------------


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
    result: torch.Tensor = with_a_dimension(stock, self, dim, index)
    return result


def _squeeze(stock: _Stock, self: torch.Tensor, dim: Any) -> torch.Tensor:
    """`squeeze_copy`, of which `squeeze` is made."""
    return stock(self, dim) if self.ndim else self.clone()


def _roll(stock: _Stock, self: torch.Tensor, *args: Any) -> torch.Tensor:
    """Of no elements, torch_xla's own ends the process."""
    result: torch.Tensor = with_a_dimension(stock, self, *args) if self.numel() else self.clone()
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


def _repeated_places(repeats: torch.Tensor, *, output_size: int | None = None) -> torch.Tensor:
    """`repeat_interleave.Tensor`: for each position of the result the place that it repeats."""
    if output_size is None:
        # How long the result is depends on values, so that it is computed on the host, as by torch_xla.
        return torch.repeat_interleave(repeats.cpu()).to(repeats.device)
    ends = repeats.cumsum(0)
    return torch.searchsorted(ends, torch.arange(output_size, device=repeats.device), right=True).to(repeats.dtype)


def _search_sorted(
    sorted_sequence: torch.Tensor,
    self: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: torch.Tensor | None = None,
) -> torch.Tensor:
    """Counts what stands before each value, which XLA does without storing the comparisons."""
    if sorter is not None:
        sorted_sequence = sorted_sequence.gather(-1, sorter)
    if isinstance(self, torch.Tensor):
        values = self.unsqueeze(-1)
        sequence = sorted_sequence.unsqueeze(-2) if self.ndim else sorted_sequence
    else:
        values, sequence = self, sorted_sequence
    # As torch compares, also with values that are not numbers.
    behind = sequence > values if right or side == "right" else sequence >= values
    return (~behind).sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


def _bucketize(
    self: torch.Tensor, boundaries: torch.Tensor, *, out_int32: bool = False, right: bool = False
) -> torch.Tensor:
    return _search_sorted(boundaries, self, out_int32=out_int32, right=right)


# ---- writes by an index ---------------------------------------------------------------------------


def _along_first(
    stock: Callable[..., torch.Tensor],
    self: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """`index_add` and `index_copy`: right along the first dimension only, which there has to be."""
    if self.ndim == 0:
        one, position, added = (tensor.reshape(1) for tensor in (self, index, source))
        return stock(one, 0, position, added, **options).reshape(())
    if self.ndim < 2 or dim in (0, -self.ndim):
        return stock(self, dim, index, source, **options)
    swapped = stock(torch.transpose_copy(self, 0, dim), 0, index, torch.transpose_copy(source, 0, dim), **options)
    return torch.transpose_copy(swapped, 0, dim)


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


def _scatter_reduce(
    stock: Callable[..., torch.Tensor],
    self: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    src: torch.Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> torch.Tensor:
    """`scatter_reduce.two`, for which torch_xla 2.9 has neither means nor `include_self=False`."""
    if index.numel() == 0:
        return self.clone()
    if not self.ndim:
        row, position, source = (one.reshape(1) for one in (self, index, src))
        return _scatter_reduce(stock, row, dim, position, source, reduce, include_self=include_self).reshape(())
    for each, length in enumerate(index.shape):
        # Of the source torch reads the part that the index covers.
        src = torch.narrow_copy(src, each, 0, length) if src.shape[each] > length else src
    if not include_self:
        self = torch.scatter(self, dim, index, _neutral(self.dtype, reduce))
    if reduce != "mean":
        return stock(self, dim, index, src, reduce, include_self=True)
    total = stock(self, dim, index, src, "sum", include_self=True)
    # Where nothing was written the value counts itself, whether it is to be included or not.
    count = torch.ones_like(self) if include_self else torch.zeros_like(self)
    count = torch.scatter_add(count, dim, index, torch.ones_like(src)).clamp(min=1)
    whole = not self.is_floating_point() and not self.is_complex()
    return torch.div(total, count, rounding_mode="floor") if whole else total / count


def _neutral(dtype: torch.dtype, reduce: str) -> float | int:
    if reduce in ("sum", "mean"):
        return 0
    if reduce == "prod":
        return 1
    if dtype.is_floating_point:
        return -math.inf if reduce == "amax" else math.inf
    limits = torch.iinfo(dtype)
    return limits.min if reduce == "amax" else limits.max


def _masked_scatter_backward(grad: torch.Tensor, mask: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The gradient of the source, whose first values went to where the mask is true."""
    elements = math.prod(sizes)
    chosen = mask.expand(grad.shape).reshape(-1)
    # What was not chosen is added to one place more, which is left out.
    place = torch.where(chosen, torch.cumsum(chosen.long(), 0) - 1, elements).clamp(max=elements)
    flat = torch.zeros(elements + 1, dtype=grad.dtype, device=grad.device).scatter_add(0, place, grad.reshape(-1))
    return torch.narrow_copy(flat, 0, 0, elements).reshape(sizes)


def _indexed(
    stock: Callable[..., torch.Tensor], self: torch.Tensor, indices: Sequence[torch.Tensor | None], *args: Any
) -> torch.Tensor:
    """`index.Tensor` and `index_put_`, also where one index has 32 bits and another 64."""
    wholes = {index.dtype for index in indices if index is not None} - {torch.bool, torch.uint8}
    if len(wholes) > 1:
        indices = [index.long() if index is not None and index.dtype in wholes else index for index in indices]
    return stock(self, indices, *args)


def _index_reduce(
    self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, reduce: str, *, include_self: bool = True
) -> torch.Tensor:
    """As `scatter_reduce` with an index for whole slices."""
    if not self.ndim:
        row, other = self.reshape(1), source.reshape(1)
        return _index_reduce(row, 0, index.reshape(-1), other, reduce, include_self=include_self).reshape(())
    shape = [1] * self.ndim
    shape[dim] = index.numel()
    places = index.reshape(shape).expand(source.shape)
    return torch.scatter_reduce(self, dim, places, source, reduce, include_self=include_self)


# ---- embeddings -----------------------------------------------------------------------------------


def _renorm(self: torch.Tensor, indices: torch.Tensor, max_norm: float, norm_type: float) -> torch.Tensor:
    """`embedding_renorm_`: shortens the rows that are looked up, in place."""
    with torch.no_grad():
        positions = indices.reshape(-1)
        rows = self.index_select(0, positions)
        lengths = torch.linalg.vector_norm(rows, norm_type, 1, keepdim=True)
        # A row that is looked up twice is written twice, with the same values.
        self.index_copy_(0, positions, torch.where(lengths > max_norm, rows * (max_norm / (lengths + 1e-7)), rows))
    return self


def _sparse_backward(
    grad: torch.Tensor, indices: torch.Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> torch.Tensor:
    """`embedding_sparse_backward`: XLA has no sparse tensors."""
    warn_of_dense_gradients()
    gradient: torch.Tensor = torch.ops.aten.embedding_dense_backward(
        grad, indices, num_weights, padding_idx, scale_grad_by_freq
    )
    return gradient


def _embedding_bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`_embedding_bag`: the bags, the bag of each index, the size of each bag, and where maxima stand."""
    if sparse and weight.requires_grad:
        warn_of_dense_gradients()
    bags = offsets.numel() - int(include_last_offset)
    starts = offsets[:bags]
    place = torch.arange(indices.numel(), device=indices.device)
    bag = (place.unsqueeze(1) >= starts).sum(1) - 1
    counted = torch.ones_like(indices) if padding_idx < 0 else (indices != padding_idx).to(indices.dtype)
    sizes = torch.zeros(bags, dtype=indices.dtype, device=indices.device).index_add(0, bag, counted)
    rows = weight.index_select(0, indices)
    if rows.dtype.itemsize < 4:
        rows = rows.float()
    if scale_grad_by_freq and rows.requires_grad:
        frequency = torch.zeros_like(weight[:, 0], dtype=rows.dtype).index_add(0, indices, torch.ones_like(rows[:, 0]))
        divisor = frequency.detach()[indices].unsqueeze(1)
        rows.register_hook(lambda gradient: gradient / divisor)
    shape = (bags, weight.shape[1])
    if mode == _MAX:
        position = bag.unsqueeze(1).expand_as(rows)
        if padding_idx >= 0:
            rows = rows.masked_fill((counted == 0).unsqueeze(1), -torch.inf)
        lowest = torch.full(shape, -torch.inf, dtype=rows.dtype, device=rows.device)
        highest = lowest.scatter_reduce(0, position, rows, "amax", include_self=True)
        result = torch.where((sizes == 0).unsqueeze(1), torch.zeros_like(highest), highest)
    else:
        factor = counted.to(rows.dtype)
        if per_sample_weights is not None:
            factor = factor * per_sample_weights
        result = torch.zeros(shape, dtype=rows.dtype, device=rows.device).index_add(0, bag, rows * factor.unsqueeze(1))
        if mode == _MEAN:
            result = result / sizes.clamp(min=1).unsqueeze(1).to(rows.dtype)
    return result.to(weight.dtype), bag, sizes, torch.zeros_like(offsets)


KERNELS = Kernels(
    differentiable={
        "_embedding_bag": _embedding_bag,
        "_embedding_bag_forward_only": _embedding_bag,
    },
    above_autograd={
        # The first writes in place, which only autograd's kernels may: below them tensors have no memory of their own.
        "embedding_renorm_": _renorm,
        # The first writes in place, which only autograd's kernels may: below them tensors have no memory of their own.
        "embedding_sparse_backward": _sparse_backward,
    },
    below_autograd={
        "searchsorted.Tensor": _search_sorted,
        "searchsorted.Scalar": _search_sorted,
        "bucketize.Tensor": _bucketize,
        **dict.fromkeys(("unfold", "unfold_copy"), _unfold),
        "masked_scatter_backward": _masked_scatter_backward,
        "index_reduce": _index_reduce,
        "repeat_interleave.Tensor": _repeated_places,
    },
    around_below_autograd={
        "index_add": _along_first,
        "index_copy": _along_first,
        "as_strided_scatter": _as_strided_scatter,
        "diagonal": _diagonal,
        "diagonal_copy": _diagonal,
        "diagonal_scatter": _diagonal_scatter,
        **dict.fromkeys(("index_fill.int_Scalar", "index_fill.int_Tensor"), _index_fill),
        "gather": _gather,
        "index_select": _index_select,
        **dict.fromkeys(_SCATTERS, _scatter),
        **dict.fromkeys(("squeeze_copy.dim", "squeeze_copy.dims"), _squeeze),
        "roll": _roll,
        "repeat": _repeat,
        "randperm": _random_permutation,
        "slice.Tensor": _slice,
        "slice_copy.Tensor": _slice,
        "slice_scatter": _slice_scatter,
        "slice_backward": _slice_backward,
        "scatter_reduce.two": _scatter_reduce,
        **dict.fromkeys(("index.Tensor", "index_put_"), _indexed),
    },
)
