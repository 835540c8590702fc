"""Operators of torch_tpu 0.2 that do something else than steps, or torch, rely on.

Copies: a `clone()`, and the target of a `copy_` or a `copy.deepcopy`, has the buffer of its source, as no eager
operation writes into a buffer. The executable of a step does: it is given the buffers of what it changes. With a shared
one that is an error, or the other tensor loses its value.

They also leave out that an imaginary part of `conj()` is the negative of its memory.

Gradients of embeddings with `sparse=True` have no buffer, and so no step can return them.

Batch norm leaves the running statistics as they are.

`index_reduce` ends the process, and some losses are missing.

Second derivatives: the backward of torch_tpu's own autograd functions is not differentiable. Under `create_graph` its
gradients are constants, so that a gradient penalty through a cross entropy would be wrong, without an error.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch.library import Library, get_kernel
from torch_tpu._internal.execution_mode import execution_mode_impl as _modes

from xla_adapters.errors import warn_of_dense_gradients
from xla_adapters.utils.torch_modes import unwrapped

_TYPE, _KEY = "tpu", "PrivateUse1"
_RECORD = _modes._EagerMode.INTERNAL_COMPILE_FX_GRAPH

# Backwards that may return sparse gradients, with the position of the argument that says so.
_SPARSE = {"embedding_backward": 5, "_embedding_bag_backward": 9}
_REPLACED = ("clone", "_to_copy", "copy_", "native_batch_norm", *_SPARSE)

# By torch's own decompositions.
_MISSING = ("smooth_l1_loss", "smooth_l1_loss_backward", "huber_loss", "huber_loss_backward", "renorm")

_AUTOGRAD_KEY = "AutogradPrivateUse1"
# Their functions save what they are given, so that a weak reference to it lives as long as a backward is possible.
_LOSSES = (torch.ops.aten.cross_entropy_loss.default, torch.ops.aten.nll_loss_nd.default)
# Their functions have nothing to spare compared with what torch composes.
_COMPOSED = (torch.ops.aten.repeat_interleave.self_int,)

_Gradients = Sequence[torch.Tensor | None]

_sharing = False


@contextmanager
def sharing_copies() -> Iterator[None]:
    """Copies share their buffer meanwhile, which costs no launch: for what no step changes."""
    global _sharing
    before, _sharing = _sharing, True
    try:
        yield
    finally:
        _sharing = before


@cache
def mend_operators() -> Library:
    """Puts the operators right, in steps and out of them. Once in a process."""
    library = Library("aten", "IMPL")
    stock = {name: get_kernel(f"aten::{name}", _KEY) for name in _REPLACED}

    def clone(keys: Any, source: torch.Tensor, **options: Any) -> Any:
        return stock["clone"].call_boxed(keys, _apart(source), **options)

    def _to_copy(keys: Any, source: torch.Tensor, **options: Any) -> Any:
        device = options.get("device")
        source = _apart(source) if device is None or device.type == _TYPE else _negated(source)
        return stock["_to_copy"].call_boxed(keys, source, **options)

    def copy_(keys: Any, target: torch.Tensor, source: torch.Tensor, *options: Any) -> Any:
        source = _apart(source) if target.device.type == _TYPE else _negated(source)
        return stock["copy_"].call_boxed(keys, target, source, *options)

    def _foreach_copy_(
        keys: Any, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *options: Any
    ) -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, *options)

    def native_batch_norm(keys: Any, batch: torch.Tensor, *options: Any) -> Any:
        _, _, mean, variance, training, momentum, _ = options
        if training and mean is not None and variance is not None:
            _update_statistics(batch, mean, variance, momentum)
        return stock["native_batch_norm"].call_boxed(keys, batch, *options)

    with warnings.catch_warnings():
        # That there are others already.
        warnings.simplefilter("ignore")
        for function in (clone, _to_copy, copy_, _foreach_copy_, native_batch_norm):
            library.impl(function.__name__, function, _KEY, with_keyset=True, allow_override=True)
        for name, position in _SPARSE.items():
            library.impl(name, _dense_in_steps(stock[name], position), _KEY, with_keyset=True, allow_override=True)
        for name in _MISSING:
            library.impl(name, _decomposed(getattr(torch.ops.aten, name).default), _KEY)
        library.impl("index_reduce", _index_reduce, _KEY, allow_override=True)
        library.impl("index_reduce_", _index_reduce_, _KEY, allow_override=True)
        library.impl("index_reduce.out", _index_reduce_out, _KEY, allow_override=True)
        mend_second_derivatives(library)
    return library


def _decomposed(operator: OpOverload) -> Callable[..., Any]:
    """What torch composes an operator of. A gradient divides by the number of elements: of none it is empty."""
    composed: Callable[..., Any] = decomposition_table[operator]

    def compute(*args: Any, **kwargs: Any) -> Any:
        if operator.name().endswith("_backward") and not args[1].numel():
            return torch.zeros_like(args[1])
        return composed(*args, **kwargs)

    return compute


def _index_reduce(
    input: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, reduce: str, *, include_self: bool = True
) -> torch.Tensor:
    """As `Tensor.index_reduce`."""
    rows = list(input.shape)
    rows[dim] = index.numel()
    if list(source.shape) != rows:
        raise RuntimeError(
            f"index_reduce: {index.numel()} indices of dimension {dim} of {list(input.shape)} need a source of {rows}; "
            f"it is {list(source.shape)}"
        )
    shape = [1] * source.ndim
    shape[dim] = index.numel()
    return input.scatter_reduce(dim, index.reshape(shape).expand_as(source), source, reduce, include_self=include_self)


def _index_reduce_(input: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    return input.copy_(_index_reduce(input, *args, **options))


def _index_reduce_out(*args: Any, out: torch.Tensor, **options: Any) -> torch.Tensor:
    return out.copy_(_index_reduce(*args, **options))


def _dense_in_steps(stock: Any, position: int) -> Callable[..., Any]:
    """A backward of an embedding whose argument at a position says that the gradient is to be sparse."""

    def backward(keys: Any, *args: Any) -> Any:
        if args[position] and _modes._get_eager_mode() == _RECORD:
            warn_of_dense_gradients()
            args = (*args[:position], False, *args[position + 1 :])
        return stock.call_boxed(keys, *args)

    return backward


def part_copies() -> None:
    """Gives all tensors of the device that live buffers of their own, with one launch for each.

    For copies from before `mend_operators`: torch_tpu does not tell which share a buffer. Tensors of one storage go on
    sharing it; a storage of which there is a view keeps its buffer.
    """
    by_storage: dict[int, list[torch.Tensor]] = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, torch.nn.Parameter) and item.device.type == _TYPE:
            for tensor in (item, item.grad if item.is_leaf else None):
                if tensor is not None and tensor.device.type == _TYPE:
                    by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    for tensors in by_storage.values():
        if all(_is_whole(tensor) for tensor in tensors):
            value = tensors[0].detach().clone()
            for tensor in tensors:
                tensor.data = value if tensor.shape == value.shape else value.view(tensor.shape)


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _apart(source: torch.Tensor) -> torch.Tensor:
    """The value in another buffer; in a trace, where nothing is executed, the tensor itself."""
    source = _negated(source)
    if _sharing or source.device.type != _TYPE or not source.is_contiguous() or _modes._get_eager_mode() == _RECORD:
        return source
    if source.is_conj():
        # Every operator but a copy would first copy it.
        return _apart(source.conj()).conj()
    return torch.cat([source.unsqueeze(0)]).squeeze(0)


def _negated(source: torch.Tensor) -> torch.Tensor:
    """The value of an imaginary part of `conj()`, which says by a mark that it is the negative of its memory."""
    return torch.neg(torch._neg_view(source)) if source.is_neg() and source.device.type == _TYPE else source


def _update_statistics(batch: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, momentum: float) -> None:
    dims = [dim for dim in range(batch.ndim) if dim != 1]
    found = torch.var_mean(batch.to(mean.dtype), dims, correction=1)
    # As the operators of other devices: backward, which saves them, does not read them.
    with torch.autograd._unsafe_preserve_version_counter((mean, variance)):  # type: ignore[attr-defined]
        for running, value in zip((variance, mean), found, strict=True):
            running.copy_(running * (1 - momentum) + value * momentum)


# ---- second derivatives ---------------------------------------------------------------------------


def mend_second_derivatives(library: Library) -> None:
    """Has gradients be differentiable where they are asked for with `create_graph`.

    Args:
        library: of "aten", gets the kernels.
    """
    for operator, kernel in (*((op, _differentiable(op)) for op in _LOSSES), *((op, op.decompose) for op in _COMPOSED)):
        library.impl(
            operator.name().partition("::")[2],
            kernel,
            _AUTOGRAD_KEY,
            with_keyset=operator in _LOSSES,
            allow_override=True,
        )


def _differentiable(operator: OpOverload[..., Any]) -> Callable[..., torch.Tensor]:
    """torch_tpu's kernel of an operator; a backward with `create_graph` computes what torch composes instead."""
    stock = get_kernel(operator.name(), _AUTOGRAD_KEY)

    def kernel(keys: Any, *args: Any, **options: Any) -> torch.Tensor:
        if any(isinstance(value, torch.Tensor) and unwrapped(value) is not value for value in args):
            # In a transform of `torch.func`, which differentiates the result as often as it likes.
            whole: torch.Tensor = operator.decompose(*args, **options)
            return whole
        result: torch.Tensor = stock.call_boxed(keys, *args, **options)
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


# ---- scans, in programs of several ranks --------------------------------------------------------

# XLA's partitioner (Shardy) refuses the tuples of torch_tpu's scans ("Shardy propagation doesn't support tuples"). Here
# a scan is as many shifted operations as its length has bits (Hillis and Steele 1986); sums are rounded otherwise.


def _shifts(length: int) -> list[int]:
    return [1 << bit for bit in range(max(0, length - 1).bit_length())]


def _scanned(
    value: torch.Tensor, dim: int, combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], neutral: float
) -> torch.Tensor:
    if not value.ndim:
        return value.clone()
    length = value.shape[dim]
    for shift in _shifts(length):
        before = value.narrow(dim, 0, length - shift)
        filler = torch.full_like(value.narrow(dim, 0, shift), neutral)
        value = combine(torch.cat([filler, before], dim), value)
    return value


def _in_dtype(value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    integral = not (value.is_floating_point() or value.is_complex())
    return value.to(dtype if dtype is not None else torch.int64 if integral else value.dtype)


def _cumsum(value: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _scanned(_in_dtype(value, dtype), dim, torch.add, 0)


def _cumprod(value: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _scanned(_in_dtype(value, dtype), dim, torch.mul, 1)


def _logcumsumexp(value: torch.Tensor, dim: int) -> torch.Tensor:
    return _scanned(value, dim, _logaddexp, -torch.inf)


def _logaddexp(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """As `torch.logaddexp`, which torch_tpu does not have."""
    largest = torch.maximum(one, other)
    # Two infinities have no difference.
    return torch.where(largest.isinf(), largest, largest + torch.log1p(torch.exp(-(one - other).abs())))


def _extreme(is_beaten: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """`cummax` or `cummin`: of equal values the later one counts, and NaN beats all."""

    def compute(value: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not value.ndim:
            return value.clone(), torch.zeros_like(value, dtype=torch.int64)
        length, shape = value.shape[dim], [1] * value.ndim
        shape[dim] = length
        index = torch.arange(length, device=value.device).reshape(shape).expand_as(value)
        for shift in _shifts(length):
            late, early = value.narrow(dim, shift, length - shift), value.narrow(dim, 0, length - shift)
            stays = is_beaten(early, late) | late.isnan()
            first, where = value.narrow(dim, 0, shift), index.narrow(dim, 0, shift)
            later, earlier = index.narrow(dim, shift, length - shift), index.narrow(dim, 0, length - shift)
            value = torch.cat([first, torch.where(stays, late, early)], dim)
            index = torch.cat([where, torch.where(stays, later, earlier)], dim)
        return value, index

    return compute


@cache
def mend_scans() -> Library:
    """Replaces the operators in steps. Once in a process, if it is one of several ranks."""
    library = Library("aten", "IMPL")
    kernels: dict[str, Callable[..., Any]] = {
        "cumsum": _cumsum,
        "cumprod": _cumprod,
        "logcumsumexp": _logcumsumexp,
        "cummax": _extreme(torch.le),
        "cummin": _extreme(torch.ge),
    }
    for name, kernel in kernels.items():
        library.impl(name, _in_steps(name, kernel), _KEY, with_keyset=True, allow_override=True)
    return library


def _in_steps(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    stock = get_kernel(f"aten::{name}", _KEY)

    def compute(keys: Any, *args: Any, **options: Any) -> Any:
        if _modes._get_eager_mode() == _RECORD:
            return kernel(*args, **options)
        return stock.call_boxed(keys, *args, **options)

    return compute
