"""More calls of operators that torch_xla computes on the host or wrongly; see `operator_calls`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional

_Tensor = torch.Tensor
_Call = Callable[[_Tensor], _Tensor]
_ROWS = (6, 8)
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


FURTHER: dict[str, tuple[tuple[int, ...], dict[str, _Call]]] = {
    "writes by a mask": (
        _ROWS,
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
        _ROWS,
        {
            f"{reduce}, {dim}, {include}": lambda x, reduce=reduce, dim=dim, include=include: x.index_reduce(
                dim, _there(x, 0, 2, 0), x.narrow(dim, 1, 3) * 2, reduce, include_self=include
            )
            for reduce in ("mean", "prod", "amax", "amin")
            for dim, include in ((0, True), (-1, False))
        },
    ),
    "complex numbers": (
        _ROWS,
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
        _ROWS,
        {
            "minimum": lambda x: x.cummin(1)[0],
            "place of the minimum": lambda x: x.round().cummin(1)[1].float() + x,
            "minimum of integers": lambda x: (x * 3).int().cummin(0)[0] * x,
            "maximum": lambda x: x.cummax(-1)[0],
            "place of the maximum": lambda x: x.round().cummax(0)[1].float() + x,
        },
    ),
    "medians": (
        _ROWS,
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
        _ROWS,
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
}
