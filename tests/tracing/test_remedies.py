"""What the messages of graph breaks offer in place of an operator: the same values and gradients, in one graph."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops.roi_align import _roi_align, roi_align

import xla_adapters
from tests.device import DEVICE
from tests.isolation import isolated
from xla_adapters.tracing import remedies


def _positive(x: Tensor) -> Tensor:
    return x @ x.mT + 4 * torch.eye(len(x), device=x.device)


def _rfft(x: Tensor) -> Tensor:
    return torch.fft.rfft(x).abs()


def _rfft_by_matrix(x: Tensor) -> Tensor:
    n = x.shape[-1]
    angle = (2 * math.pi / n * torch.outer(torch.arange(n // 2 + 1), torch.arange(n))).to(x.device)
    real, imaginary = x @ angle.cos().T, -(x @ angle.sin().T)
    return (real.square() + imaginary.square()).sqrt()


def _inverse_by_eigh(x: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(_positive(x))
    return (vectors / values) @ vectors.mT


def _solved_by_cholesky(x: Tensor) -> Tensor:
    root = torch.linalg.cholesky(_positive(x))
    whitened = torch.linalg.solve_triangular(root, torch.eye(len(x), device=x.device), upper=False)
    return whitened.mT @ whitened


def _log_determinant(x: Tensor) -> Tensor:
    return torch.linalg.eigh(_positive(x))[0].log().sum()


def _square_of_root(x: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(_positive(x))
    root = vectors * values.sqrt()
    return root @ root.mT


def _index(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device).remainder(3).expand_as(x)


def _first_positive(x: Tensor) -> Tensor:
    return x.flatten()[(x > 0).flatten().long().argsort(descending=True, stable=True)[:4]]


def _how_many(x: Tensor) -> Tensor:
    ordered = x.round().flatten().sort().values
    return (ordered[1:] != ordered[:-1]).sum() + 1


def _whole(x: Tensor) -> Tensor:
    return x.detach().abs().long().flatten()


_Function = Callable[[Tensor], Tensor]
# The image's number, and a box.
_REGIONS = torch.tensor([[0.0, 1, 1, 6, 5], [0, 0, 2, 7, 7]])
# The entry, what cannot be a part of the graph, and the same as the entry says. Both take a tensor of shape (8, 8).
PAIRS: dict[str, list[tuple[_Function, _Function]]] = {
    "_fft_r2c": [(_rfft, _rfft_by_matrix)],
    "linalg_cholesky_ex": [
        (_solved_by_cholesky, _inverse_by_eigh),
        (lambda x: 2 * torch.linalg.cholesky(_positive(x)).diagonal().log().sum(), _log_determinant),
        (lambda x: (root := torch.linalg.cholesky(_positive(x))) @ root.mT, _square_of_root),
    ],
    "_linalg_solve_ex": [
        (lambda x: torch.linalg.solve(_positive(x), x), lambda x: torch.linalg.pinv(_positive(x)) @ x)
    ],
    "linalg_inv": [(lambda x: torch.linalg.inv(_positive(x)), lambda x: torch.linalg.pinv(_positive(x)))],
    "linalg_lstsq": [
        (lambda x: torch.linalg.lstsq(_positive(x), x).solution, lambda x: torch.linalg.pinv(_positive(x)) @ x)
    ],
    "_linalg_det": [
        (lambda x: torch.linalg.det(_positive(x) / 8), lambda x: torch.linalg.svdvals(_positive(x) / 8).prod(dim=-1))
    ],
    "masked_select": [
        (lambda x: x.masked_select(x > 0).mean(), lambda x: torch.where(x > 0, x, 0).sum() / (x > 0).sum())
    ],
    "a boolean index": [(lambda x: x[x > 0].mean(), lambda x: torch.where(x > 0, x, 0).sum() / (x > 0).sum())],
    "nonzero": [(lambda x: x[tuple((x > 0).nonzero()[:4].T)], _first_positive)],
    "torch.where with one argument": [(lambda x: x[torch.where(x > 0)][:4], _first_positive)],
    "unique": [(lambda x: x + x.round().unique().numel(), lambda x: x + _how_many(x))],
    "bincount": [(lambda x: x.sum() * _whole(x).bincount(), lambda x: x.sum() * F.one_hot(_whole(x), 4).sum(0))],
    "one_hot": [(lambda x: x.sum() * F.one_hot(_whole(x)), lambda x: x.sum() * F.one_hot(_whole(x), 4))],
    "torchvision::roi_align": [
        (
            lambda x: roi_align(x[None, None], _REGIONS.to(x.device), 3, sampling_ratio=2),
            lambda x: _roi_align(x[None, None], _REGIONS.to(x.device), 1.0, 3, 3, 2, False),
        )
    ],
    "repeat_interleave without output_size": [
        (
            lambda x: x.repeat_interleave(_index(x)[0], 0),
            lambda x: x[torch.searchsorted(_index(x)[0].cumsum(0), torch.arange(7, device=x.device), right=True)],
        )
    ],
}
# Shared by several entries; and draws are random.
ALSO = {
    "_fft_c2c": "_fft_r2c",
    "_fft_c2r": "_fft_r2c",
    "linalg_solve_triangular": "linalg_cholesky_ex",
    "linalg_eig": "linalg_cholesky_ex",
    "inverse": "linalg_inv",
    "torchvision::_roi_align_backward": "torchvision::roi_align",
    "unique_consecutive": "unique",
    "repeat_interleave": "repeat_interleave without output_size",
}
ELSEWHERE = {"multinomial", "to", "torchvision::nms", remedies.SEARCH_FOR_NAN, remedies.TENSOR_AS_RATE}


def test_each_entry_is_tried_here() -> None:
    entries = remedies._REMEDIES
    assert entries.keys() == PAIRS.keys() | ALSO.keys() | ELSEWHERE
    for name, other in ALSO.items():
        assert entries[name] == entries[other]


def _values() -> Tensor:
    values = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).clamp(-3, 3)
    # One whole number of 3, so that there are four different ones.
    values[0, 0] = 3
    return values


def _result_and_gradient(function: _Function, x: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.ones((), device=x.device, requires_grad=True)
    # Pending, as what a model computes is.
    leaf = x.clone().requires_grad_()
    result = function(leaf * scale)
    result.square().mean().backward()
    assert leaf.grad is not None
    return result.detach(), leaf.grad


@isolated
@pytest.mark.parametrize("part", range(3))
def test_alternatives_are_equal_and_in_one_graph(part: int) -> None:
    wrong = {}
    with xla_adapters.eager():
        values = _values()
        on_device = values.to(DEVICE)
        for name in list(PAIRS)[part::3]:
            for refused, alternative in PAIRS[name]:
                expected, gradient = _result_and_gradient(refused, values.clone())
                with pytest.raises(xla_adapters.GraphBreakError) as raised, xla_adapters.step():
                    _result_and_gradient(refused, on_device)
                text = remedies._REMEDIES[name]
                if f"remedies: (1) {text}; (2) " not in str(raised.value):
                    wrong[name] = f"another remedy is offered: {raised.value}"
                with xla_adapters.count() as counters, xla_adapters.step():
                    found, its_gradient = _result_and_gradient(alternative, on_device)
                if (counters.executions, counters.eager_ops) != (1, 0):
                    wrong[name] = f"{counters.executions} executions"
                if not torch.allclose(found.cpu().reshape(expected.shape), expected, rtol=1e-3, atol=1e-4):
                    wrong[name] = f"{found.cpu()} in place of {expected}"
                if not torch.allclose(its_gradient.cpu(), gradient, rtol=1e-2, atol=1e-3):
                    wrong[name] = f"the gradient is {its_gradient.cpu()} in place of {gradient}"
    assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())


@isolated
def test_draws_without_replacement() -> None:
    """The first of two draws has the probabilities that were asked for, and the second is another one."""
    with xla_adapters.eager():
        asked = torch.tensor([0.1, 0.2, 0.3, 0.4])
        probabilities = asked.expand(4000, 4).to(DEVICE)
        with pytest.raises(xla_adapters.HostOperatorError, match=r"remedies: \(1\) draw without"), xla_adapters.step():
            torch.multinomial(probabilities * 1, 2)
        with xla_adapters.count() as counters, xla_adapters.step():
            noise = torch.rand_like(probabilities).log().neg().log()
            drawn = (probabilities.log() - noise).topk(2, -1).indices
        assert counters.executions == 1
        first, second = drawn.cpu().T
        assert not (first == second).any()
        assert torch.allclose(first.bincount(minlength=4) / 4000, asked, atol=0.04)
