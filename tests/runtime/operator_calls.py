"""Calls of operators that torch_xla computes on the host or wrongly, by the shape of their input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional

Call = Callable[[torch.Tensor], torch.Tensor]
IMAGE, _VOLUME, _ROWS = (2, 3, 5, 6), (1, 2, 4, 3, 5), (6, 8)


def _read_at(values: torch.Tensor, found: torch.Tensor, positions: torch.Tensor, dims: int = 2) -> torch.Tensor:
    """What stands at the positions of a pool, with the pool's own gradients."""
    there: torch.Tensor = values.detach().flatten(-dims).gather(-1, positions.flatten(-dims))
    return found * there.reshape(found.shape)


def _with_statistics(x: torch.Tensor) -> torch.Tensor:
    mean, variance = torch.zeros(3, device=x.device), torch.ones(3, device=x.device)
    result = torch.ops.aten._native_batch_norm_legit(x, None, None, mean, variance, True, 0.3, 1e-5)[0]
    return result + (mean + variance).reshape(-1, 1)


def _places(values: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long, device=values.device)


def _written(values: torch.Tensor, mask: torch.Tensor, value: torch.Tensor | float) -> torch.Tensor:
    written = values * 1
    written[mask] = value
    return written


# Shape of the input, and calls that are computed, with their gradient, on the CPU and in a step.
GROUPS: dict[str, tuple[tuple[int, ...], dict[str, Call]]] = {
    "resizing images": (
        IMAGE,
        {
            "nearest, twice": lambda x: functional.interpolate(x, scale_factor=2),
            "nearest, to a size": lambda x: functional.interpolate(x, (7, 4)),
            "nearest, factors": lambda x: functional.interpolate(x, scale_factor=(1.3, 0.7)),
            "nearest-exact": lambda x: functional.interpolate(x, (8, 4), mode="nearest-exact"),
            "bilinear": lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"),
            "bilinear, corners": lambda x: functional.interpolate(x, (9, 3), mode="bilinear", align_corners=True),
            "bilinear, factor": lambda x: functional.interpolate(x, scale_factor=1.7, mode="bilinear"),
            "bicubic": lambda x: functional.interpolate(x, (9, 4), mode="bicubic"),
            "bicubic, corners": lambda x: functional.interpolate(x, (9, 4), mode="bicubic", align_corners=True),
            "bilinear, antialias": lambda x: functional.interpolate(x, (2, 9), mode="bilinear", antialias=True),
            "bicubic, antialias": lambda x: functional.interpolate(x, (2, 3), mode="bicubic", antialias=True),
        },
    ),
    "pooling images": (
        IMAGE,
        {
            "average, divisor": lambda x: functional.avg_pool2d(x, 2, divisor_override=3),
            "average, ceil": lambda x: functional.avg_pool2d(x, 2, 2, 1, ceil_mode=True),
            "average, ceil and divisor": lambda x: functional.avg_pool2d(x, 3, 2, 1, True, False, 5),
            "average, plain": lambda x: functional.avg_pool2d(x, 3, 2, 1),
            "average, 1d": lambda x: functional.avg_pool1d(x[0], 4, 3, 1, ceil_mode=True),
            "adaptive maximum": lambda x: functional.adaptive_max_pool2d(x, (3, 4)),
            "adaptive maximum, divided": lambda x: functional.adaptive_max_pool2d(x, (5, 2)),
            "adaptive maximum, 1d": lambda x: functional.adaptive_max_pool1d(x[0], 4),
            "adaptive average": lambda x: functional.adaptive_avg_pool2d(x, (3, 4)),
            "unfold": lambda x: functional.unfold(x, 2, padding=1),
            "fold": lambda x: functional.fold(x.reshape(1, 12, 15)[:, :, :12], (4, 5), 2),
            "grid": lambda x: functional.grid_sample(x, x[:, :2].permute(0, 2, 3, 1).tanh(), align_corners=False),
            "grid, nearest": lambda x: functional.grid_sample(
                x, x[:, :2].detach().permute(0, 2, 3, 1), "nearest", "border", align_corners=True
            ),
            "grid, reflected": lambda x: functional.grid_sample(
                x, x[:, :2].permute(0, 2, 3, 1) * 1.5, "bicubic", "reflection", align_corners=False
            ),
        },
    ),
    "dilated pooling and negative padding": (
        IMAGE,
        {
            "pool": lambda x: functional.max_pool2d(x, 2, 2, 1, 2),
            "pool, ceil": lambda x: functional.max_pool2d(x, (2, 3), 2, 1, (2, 1), ceil_mode=True),
            "pool, indices": lambda x: _read_at(x, *functional.max_pool2d(x, 3, 2, 1, 2, return_indices=True)),
            "pool, backward": lambda x: torch.ops.aten.max_pool2d_with_indices_backward(
                x[..., 2:, 2:], x, [2], [1], [0], [2], False, functional.max_pool2d(x, 2, 1, 0, 2, False, True)[1]
            ),
            "pool, 1d": lambda x: functional.max_pool1d(x[0], 3, 2, 1, 2),
            "pool, 3d": lambda x: functional.max_pool3d(x, 2, 1, 1, (2, 1, 3)),
            "pool, 3d, indices": lambda x: _read_at(
                x, *functional.max_pool3d(x, 2, 1, 1, (1, 2, 1), return_indices=True), dims=3
            ),
            "reflected": lambda x: functional.pad(x, (-1, 2, 3, -2), mode="reflect"),
            "repeated": lambda x: functional.pad(x, (-1, 2, 3, -2), mode="replicate"),
            "repeated, 1d": lambda x: functional.pad(x[0], (2, -3), mode="replicate"),
            "repeated, 3d": lambda x: functional.pad(x, (-1, 2, 3, -2, -1, 1), mode="replicate"),
        },
    ),
    "no dimensions": (
        (),
        {
            "extremes": lambda x: x.amax(0) + x.amin() + x.max(0)[0] * 2 + x.min(0, keepdim=True)[0] + x.argmax(0),
            "products": lambda x: x.prod(0) + x.cumsum(0) * x.cumprod(-1),
            "topk": lambda x: x.topk(1, 0)[0] + x.topk(1)[1],
            "spread": lambda x: x.var(0, correction=0) + x.std(0, correction=0).detach() + x.logsumexp(0) + x.mean(0),
            "order": lambda x: x.sort(0)[0] + x.flip(0) * x.kthvalue(1)[0] + x.cummax(0)[0] + x.nansum(0),
            "conditions": lambda x: x * ((x > 0).any(0) | (x > 0).all(0) | (x > 0).any((0,))),
            "fill": lambda x: x.index_fill(0, _places(x), 3.0) + x.unfold(0, 1, 1).squeeze(),
            "squeeze": lambda x: x.squeeze(0) + x.squeeze((0,)) * 2,
            "gather": lambda x: x.gather(0, _places(x)) + x.gather(0, _places(x, 1)) + x.index_select(0, _places(x)),
            "scatter": lambda x: x.scatter(0, _places(x), 3.0) * x.scatter(0, _places(x), x * 2),
            "add": lambda x: x.scatter_add(0, _places(x), x * 2) + x.index_add(0, _places(x), x * 3),
            "copy": lambda x: x.index_copy(0, _places(x, 1), x.reshape(1) * 2),
            "reduce": lambda x: x.scatter_reduce(0, _places(x), x * 2, "mean", include_self=True),
        },
    ),
    "masks and places": (
        (5, 5),
        {
            "set by a mask": lambda x: torch.index_put(x, (x[:, 0] > 0,), x[0]),
            "added by a mask": lambda x: (x * 1).index_put_((x[:, 0] > 0,), x[0], accumulate=True),
            "written by a mask": lambda x: _written(x, x > 0, 2.0) + _written(x, x[0] > 0, x[1]),
            "masked_scatter": lambda x: x.masked_scatter(x > 0, x.flip(0) * 2),
            "masked_scatter, a row": lambda x: x.masked_scatter(x[0] > 0, x.flip(0) * 2),
            **{
                f"{reduce}, {include_self}": lambda x, reduce=reduce, include_self=include_self: x.scatter_reduce(
                    1,
                    torch.tensor([[0, 0, 2], [1, 1, 1], [3, 4, 3]], device=x.device),
                    x[:3, :3] * 2,
                    reduce,
                    include_self=include_self,
                )
                for reduce in ("sum", "mean", "prod", "amax", "amin")
                for include_self in (True, False)
            },
            "addmm": lambda x: torch.addmm(x, x, x.T, beta=0.3, alpha=2) + torch.addmm((x / 0).detach(), x, x, beta=0),
            "addmm, in place": lambda x: (x * 1).addmm_(x, x.T, beta=0.3, alpha=2),
            "pdist": lambda x: torch.pdist(x) + torch.pdist(x, 1.0) * torch.pdist(x, float("inf")),
            "pdist, count": lambda x: torch.pdist(x, 0.0),
            "cdist, count": lambda x: torch.cdist(x, x + 1, 0.0),
            "round": lambda x: x.round(decimals=2) + (x * 100).round(decimals=-1) + x.round(decimals=0) * x,
            "copied": lambda x: x + torch.ops.aten.copy(x.detach(), x[0].detach()),
            "no rows": lambda x: x.repeat(2, 0).sum() + x[:0].cumsum(1).sum() + x.gather(0, _places(x, 0)).sum() + x,
        },
    ),
    "volumes": (
        _VOLUME,
        {
            "trilinear": lambda x: functional.interpolate(x, (5, 6, 4), mode="trilinear"),
            "nearest": lambda x: functional.interpolate(x, scale_factor=2),
            "nearest-exact": lambda x: functional.interpolate(x, (5, 2, 4), mode="nearest-exact"),
            "linear": lambda x: functional.interpolate(x[0, :, 0], 7, mode="linear"),
            "average": lambda x: functional.avg_pool3d(x, 2, divisor_override=3),
            "adaptive maximum": lambda x: functional.adaptive_max_pool3d(x, (3, 2, 2)),
            "adaptive average": lambda x: functional.adaptive_avg_pool3d(x, (3, 2, 2)),
            "grid": lambda x: functional.grid_sample(
                x, x.expand(1, -1, -1, -1, -1)[:, :1].permute(0, 2, 3, 4, 1).expand(1, 4, 3, 5, 3), align_corners=True
            ),
            "grid, reflected": lambda x: functional.grid_sample(
                x,
                (x[:, :1] * 1.5).permute(0, 2, 3, 4, 1).expand(1, 4, 3, 5, 3),
                padding_mode="reflection",
                align_corners=False,
            ),
        },
    ),
    "rows": (
        _ROWS,
        {
            "unfold": lambda x: x.unfold(1, 3, 2) * x.unfold(-1, 3, 2).flip(0) + x.unfold(0, 6, 1)[..., :3, :3].sum(),
            "glu": lambda x: functional.glu(x),
            "huber": lambda x: functional.huber_loss(x, x.detach().flip(0), delta=0.5),
            "cdist": lambda x: torch.cdist(x, x.flip(0) + 1),
            "cdist, 1": lambda x: torch.cdist(x, x[:3] + 1, p=1.0),
            "cdist of equal rows": lambda x: torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist"),
            "multi-margin": lambda x: functional.multi_margin_loss(x, torch.arange(6, device=x.device)),
            "logaddexp": lambda x: torch.logaddexp(x, x.flip(1)) + torch.logaddexp2(x, x.flip(0)),
            "logcumsumexp": lambda x: torch.logcumsumexp(x * 20, 1) + torch.logcumsumexp(x, 0),
            "logcumsumexp of nothing": lambda x: torch.logcumsumexp(x.masked_fill(x < x[:1] - 1, -torch.inf), 0),
            "searchsorted": lambda x: x * torch.searchsorted(x.detach().sort(-1).values, x.detach(), right=True),
            "searchsorted, a row": lambda x: x + torch.searchsorted(x.detach()[0].sort().values, x.detach()),
            "bucketize": lambda x: x * torch.bucketize(x.detach(), x.detach()[0].sort().values, right=True),
            "bucketize, one": lambda x: x * torch.bucketize(x.detach()[0, 0], x.detach()[0].sort().values),
            "searchsorted, unsorted": lambda x: (
                x * torch.searchsorted(x.detach(), x.detach(), sorter=x.detach().argsort(-1), side="right")
            ),
            "cross": lambda x: torch.linalg.cross(x[:, :3], x[:, 3:6]),
            "fmax and fmin": lambda x: torch.fmax(x, x.flip(0)) * torch.fmin(x, x.flip(1)),
            "copysign": lambda x: torch.copysign(x, x.flip(0)),
            "exp2": lambda x: torch.exp2(x),
            "lgamma": lambda x: torch.lgamma(x * 3),
            "digamma": lambda x: torch.digamma(x.abs() + 0.3) + torch.digamma(-0.3 - 0.4 * x.sigmoid()),
            "i0": lambda x: torch.special.i0(x * 4),
            "aminmax": lambda x: torch.aminmax(x.detach(), dim=0).max + torch.aminmax(x.detach()).min + x.amax(),
            "bags": lambda x: functional.embedding_bag(
                torch.tensor([0, 2, 1, 1, 5, 3], device=x.device), x, torch.tensor([0, 2, 2, 5], device=x.device)
            ),
            "bags, weights": lambda x: functional.embedding_bag(
                torch.tensor([[0, 2], [1, 5]], device=x.device), x, mode="sum", per_sample_weights=x[:2, :2]
            ),
            "bags, maximum": lambda x: functional.embedding_bag(
                torch.tensor([0, 2, 1, 4, 5, 3], device=x.device),
                x,
                torch.tensor([0, 2, 5], device=x.device),
                mode="max",
                padding_idx=4,
            ),
        },
    ),
    "activations and losses": (
        _ROWS,
        {
            "elu": lambda x: functional.elu(x),
            "elu, slope": lambda x: functional.elu(x * 3, 0.7),
            "elu, in place": lambda x: functional.elu(x * 3, 0.7, inplace=True),
            "selu": lambda x: functional.selu(x),
            "selu, in place": lambda x: functional.selu(x * 2, inplace=True),
            "celu": lambda x: functional.celu(x, 1.3),
            "celu, another": lambda x: functional.celu(x, 0.5),
            "celu, in place": lambda x: functional.celu(x * 2, 0.5, inplace=True),
            "kl": lambda x: functional.kl_div(x.log_softmax(1), x.detach().softmax(0), reduction="batchmean"),
            "std": lambda x: torch.std(x, 1) + x.std(),
            "singular values": lambda x: torch.svd(x)[1],
            "frozen batch norm": lambda x: functional.batch_norm(
                x.reshape(2, 3, 8), x[0, :3].detach() + 0.3, x[1, :3].detach().square() + 1, x[2, :3], x[3, :3]
            ),
            "captured batch norm": lambda x: torch.ops.aten._native_batch_norm_legit_no_training(
                x.reshape(2, 3, 8), x[2, :3], x[3, :3], x[0, :3].detach(), x[1, :3].detach().square() + 1, 0.1, 1e-5
            )[0],
            "captured batch norm in training": lambda x: _with_statistics(x.reshape(2, 3, 8)),
            "frozen batch norm, plain": lambda x: functional.batch_norm(
                x.reshape(2, 3, 8), x[0, :3].detach() + 0.3, x[1, :3].detach().square() + 1
            ),
        },
    ),
    "dimensions and strides": (
        (5, 5, 5),
        {
            "index_add": lambda x: x.index_add(1, torch.tensor([0, 3, 3, 1, 4], device=x.device), x * 2, alpha=3),
            "index_add, last": lambda x: x.index_add(-1, torch.tensor([0, 3, 3, 1, 4], device=x.device), x.flip(0)),
            "index_add, first": lambda x: x.index_add(0, torch.tensor([4, 0], device=x.device), x[:2] * 2),
            "index_copy": lambda x: x.index_copy(1, torch.tensor([4, 3, 0, 1, 2], device=x.device), x * 2),
            "index_copy, first": lambda x: x.index_copy(0, torch.tensor([4, 0], device=x.device), x[1:3] * 2),
            **{
                f"diagonal {offset}, {dims}": lambda x, offset=offset, dims=dims: x.diagonal(offset, *dims)
                for offset in (0, 1, -2)
                for dims in ((0, 1), (1, 2), (0, 2), (1, 0), (-1, 0))
            },
            "diag_embed": lambda x: torch.diag_embed(x[0], 1, 0, 1),
            "written to a diagonal": lambda x: (x * 1).diagonal_scatter(x[0, :, :4] * 2, 1, 0, 1),
            "as_strided": lambda x: x.as_strided((2, 3), (25, 5), 7) + x.as_strided((2, 3), (1, 2)),
        },
    ),
}


# ---- further groups -------------------------------------------------------------------------------


_Tensor = torch.Tensor
_Call = Callable[[_Tensor], _Tensor]
_ROWS_FURTHER = (6, 8)
_REDUCTIONS: tuple[Callable[..., _Tensor], ...] = (
    *(torch.sum, torch.mean, torch.nansum, torch.nanmean, torch.linalg.vector_norm, torch.norm),
)
_SPREADS: tuple[Callable[..., Any], ...] = (torch.std_mean, torch.var_mean)


def _with_mask(write: Callable[[_Tensor, _Tensor], object], length: int = 8) -> _Call:
    """A call that writes to a copy of the values, with a mask of every other position."""

    def call(values: _Tensor) -> _Tensor:
        written = values * 1
        write(written, torch.arange(length, device=values.device) % 2 == 0)
        return written

    return call


def _set(target: _Tensor, index: Any, value: Any) -> None:
    target[index] = value


def _there(values: _Tensor, *numbers: int) -> _Tensor:
    return torch.tensor(numbers, device=values.device)


def _complex(values: _Tensor) -> _Tensor:
    return torch.complex(values, values * 2 - 1)


def _rotated(values: _Tensor) -> _Tensor:
    """Rotary positions, as Llama's first implementation has them."""
    pairs = torch.view_as_complex(values.reshape(6, 4, 2))
    turns = torch.polar(torch.ones(4, device=values.device), torch.arange(4.0, device=values.device))
    return torch.view_as_real(pairs * turns).flatten(1)


SLICES = "slices with any bounds, windows and writes"


def _written_part(values: torch.Tensor, part: slice) -> torch.Tensor:
    values = values.clone()
    values[:, part] = 3.0
    return values * 2


def _masked_on_host(values: torch.Tensor) -> torch.Tensor:
    values = values.clone()
    # The mask is on the host.
    values[torch.arange(2) % 2 == 0] = 0.5
    return values * 2


def _reduced_by_a_long_index(values: torch.Tensor) -> torch.Tensor:
    """The index is longer than what is written to."""
    index = torch.arange(16, device=values.device).remainder(4).expand(2, 16)
    return values[:, :4].scatter_reduce(1, index, values, "sum", include_self=False)


FURTHER: dict[str, tuple[tuple[int, ...], dict[str, _Call]]] = {
    "writes by a mask": (
        _ROWS_FURTHER,
        {
            "in the last dimension": _with_mask(lambda q, mask: _set(q, (slice(None), mask), 0.5)),
            "after an ellipsis": _with_mask(lambda q, mask: _set(q, (..., mask), -1)),
            "after an integer": _with_mask(lambda q, mask: _set(q, (1, mask), 3.0)),
            "before an integer": _with_mask(lambda q, mask: _set(q, (mask[:6], 2), 3.0)),
            "before a slice": _with_mask(lambda q, mask: _set(q, (mask[:6], slice(1, 5, 2)), 3.0)),
            "in the middle": _with_mask(lambda q, mask: _set(q.view(6, 4, 2), (slice(None), mask[:4], 0), 7.0)),
            "a column": _with_mask(lambda q, mask: _set(q, (slice(None), mask), q[:, :1] * 2)),
            "a scalar tensor": _with_mask(lambda q, mask: _set(q, (slice(None), mask), q[0, 0] * 2)),
            "rows": _with_mask(lambda q, mask: _set(q, mask[:6], q[0] * 2)),
            "a row of one": _with_mask(lambda q, mask: _set(q, mask[:6], q[:1] * 2)),
            "of two dimensions": _with_mask(
                lambda q, mask: _set(q.view(6, 4, 2), (slice(None), mask.view(4, 2)), q[:, :1] + 1)
            ),
        },
    ),
    "reductions by an index": (
        _ROWS_FURTHER,
        {
            f"{reduce}, {dim}, {include}": lambda x, reduce=reduce, dim=dim, include=include: x.index_reduce(
                dim, _there(x, 0, 2, 0), x.narrow(dim, 1, 3) * 2, reduce, include_self=include
            )
            for reduce in ("mean", "prod", "amax", "amin")
            for dim, include in ((0, True), (-1, False))
        },
    ),
    "complex numbers": (
        _ROWS_FURTHER,
        {
            "absolute": lambda x: _complex(x).abs(),
            "rotary positions": _rotated,
            "parts": lambda x: (_complex(x) * 1j).real + (_complex(x) * 2).imag,
            "polar": lambda x: torch.view_as_real(torch.polar(x.abs(), x)),
            "angle": lambda x: _complex(x).angle() + x.angle(),
            "conjugate": lambda x: torch.view_as_real((_complex(x).conj() * _complex(x + 1)).resolve_conj()),
            "product": lambda x: (_complex(x) @ _complex(x).T).real,
            "product by einsum": lambda x: torch.einsum("ij,kj->ik", _complex(x), _complex(x + 1)).imag,
            "quotient": lambda x: (
                (_complex(x) / _complex(x + 1)).imag + (1 / _complex(x)).real + (_complex(x) / 2j).real
            ),
            "hyperbolic tangent": lambda x: _complex(x / 4).tanh().imag,
            "sigmoid": lambda x: _complex(x / 4).sigmoid().imag,
            "sign": lambda x: torch.sgn(_complex(x)).real,
            "logsumexp": lambda x: _complex(x).logsumexp(1).real,
        },
    ),
    "running extremes": (
        _ROWS_FURTHER,
        {
            "minimum": lambda x: x.cummin(1)[0],
            "place of the minimum": lambda x: x.round().cummin(1)[1].float() + x,
            "minimum of integers": lambda x: (x * 3).int().cummin(0)[0] * x,
            "maximum": lambda x: x.cummax(-1)[0],
            "place of the maximum": lambda x: x.round().cummax(0)[1].float() + x,
        },
    ),
    "medians": (
        _ROWS_FURTHER,
        {
            "along": lambda x: x.median(1)[0],
            "along, kept": lambda x: x.median(0, keepdim=True)[0],
            "place": lambda x: x.median(-1)[1].float()[:, None] + x,
            "of all": lambda x: x.median(),
            "of all, with NaN": lambda x: torch.where(x > 1, torch.nan, x).median(1)[0].nan_to_num(5.0),
            "of numbers": lambda x: torch.where(x > 1, torch.nan, x).nanmedian(1)[0],
            "of all numbers": lambda x: torch.where(x > 1, torch.nan, x).nanmedian(),
        },
    ),
    "composed functions": (
        _ROWS_FURTHER,
        {
            "covariance": lambda x: x.cov(),
            "covariance, biased": lambda x: torch.cov(x, correction=0),
            "correlation": lambda x: torch.corrcoef(x),
            "renorm": lambda x: x.renorm(2, 0, 1.0),
            "addbmm": lambda x: torch.addbmm(x, x[None, :, :6], x[None], beta=2, alpha=3),
            "logit": lambda x: torch.logit(x.sigmoid()) + torch.logit(x.sigmoid(), 0.3),
            "sinc": lambda x: x.sinc(),
            "entropy": lambda x: torch.special.entr(x.abs() + 0.1),
            "log of the normal distribution": lambda x: torch.special.log_ndtr(x * 8),
            "xlog1py": lambda x: torch.special.xlog1py(x, x.abs()),
            "hypotenuse": lambda x: torch.hypot(x, x + 1),
            "sign bit": lambda x: x.signbit() * x,
            "rrelu": lambda x: functional.rrelu(x.round()),
            "softmax of a number": lambda x: x[0, 0].softmax(0) + x[0, 1].log_softmax(-1) + x[0, 2],
            "loss of one sample": lambda x: functional.cross_entropy(x[0], _there(x, 3)[0]),
            "loss of one sample, not reduced": lambda x: functional.nll_loss(x[0], _there(x, 3)[0], reduction="none"),
            "reductions over no dimension": lambda x: torch.stack(
                [*(reduce(x, dim=()) for reduce in _REDUCTIONS), x.sum(axis=()), x.sum(()), x.mean(dim=[])]
            ),
            "reductions over no dimension, kept": lambda x: torch.stack(
                [*(reduce(x, dim=[], keepdim=True) for reduce in _REDUCTIONS), x.sum((), True)]
            ),
            "spreads over no dimension": lambda x: torch.stack(
                [
                    found
                    for spread in _SPREADS
                    for found in (*spread(x.detach(), dim=()), *spread(x[0, 0], dim=0, correction=0))
                ]
            ),
            "reductions of a scalar": lambda x: torch.stack([reduce(x[0, 0], dim=0) for reduce in _REDUCTIONS]),
            "a dimension of numpy's": lambda x: x.sum(np.int64(0)) + x.mean(dim=np.int64(0)),
            "8 bits divided": lambda x: ((x * 15).to(torch.int8) / 128 + (x * 15).to(torch.int8) / 300) * x,
            "convolution over time": lambda x: torch.conv_tbc(x[:, None], x.reshape(2, 8, 3), x[0, :3], 1),
            "combinations": lambda x: torch.combinations(x[0]),
            "lower triangle": lambda x: x[tuple(torch.tril_indices(6, 8, device=x.device))],
            "repeated": lambda x: x.repeat_interleave(_there(x, 1, 2, 0, 1, 3, 1), 0, output_size=8),
            "normal likelihood": lambda x: functional.gaussian_nll_loss(x, x.detach() * 2, x.abs()),
            "normal likelihood, shared": lambda x: functional.gaussian_nll_loss(
                x, x.flip(0), x[:, :1].exp(), full=True
            ),
            "margins of several labels": lambda x: functional.multilabel_margin_loss(
                x, _there(x, 1, 2, -1, 0, 0, 0, 3, 3).expand(6, 8)
            ),
        },
    ),
    SLICES: (
        (2, 16),
        {
            "from before the first": lambda values: values[:, -100:],
            "to before the first": lambda values: values[:, :-100],
            "from before, in steps": lambda values: values[:, -100:100:3],
            "an ellipsis": lambda values: values[..., -17:-1],
            "written": lambda values: _written_part(values, slice(-100, -3)),
            "nothing written": lambda values: _written_part(values, slice(None, -100)),
            "masked": _masked_on_host,
            "reduced": _reduced_by_a_long_index,
            "scattered": lambda values: torch.slice_scatter(values, values[:, :4] * 2, 1, -100, -12),
            "windows": lambda values: values.unfold(1, 4, 2),
            "windows of the first dimension": lambda values: values.unfold(0, 2, 1),
            "windows that overlap not": lambda values: values.unfold(-1, 3, 5),
        },
    ),
}
