"""Sparse gradients and tensors on TorchTPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import xla_adapters
from tests.isolation import isolated
from xla_adapters.errors import DenseGradientWarning, PlaceholderError


def _losses(device: str, *, in_step: bool) -> list[float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)).to(device)
    tokens = torch.randint(0, 10, (3, 5)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

    def train() -> torch.Tensor:
        loss = net(tokens).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = xla_adapters.step(train) if in_step else train
    return [step().item() for _ in range(4)]


@isolated
def test_sparse_gradients_of_embeddings_are_dense_in_steps() -> None:
    expected = _losses("cpu", in_step=False)
    xla_adapters.initialize()
    with pytest.warns(DenseGradientWarning, match="sparse=True"):
        found = _losses("tpu", in_step=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(_losses("tpu", in_step=False), expected, rtol=0, atol=1e-5)


@isolated
def test_bags_of_embeddings_have_dense_gradients_in_steps() -> None:
    """The stand-in for a TPU computes no bags: this is their backward alone."""
    xla_adapters.initialize()
    bags = torch.tensor([0, 0, 1]).to("tpu")
    sizes, offsets = torch.tensor([2, 1]).to("tpu"), torch.tensor([0, 2]).to("tpu")
    tokens, slopes = torch.tensor([3, 5, 3]).to("tpu"), torch.ones(2, 4).to("tpu")
    with pytest.warns(DenseGradientWarning), xla_adapters.step():
        found = torch.ops.aten._embedding_bag_backward(
            slopes, tokens, offsets, bags, sizes, sizes, 10, False, 0, True, None
        )
    assert found.layout is torch.strided
    assert found.cpu().sum(1).tolist() == [0, 0, 0, 8, 0, 4, 0, 0, 0, 0]


@isolated
def test_other_sparse_tensors_are_refused_with_the_line() -> None:
    xla_adapters.initialize()
    sparse = torch.eye(3).to_sparse().to("tpu")
    rows = torch.ones(3, 2, device="tpu")
    with pytest.raises(PlaceholderError, match=r"(?s)sparse_coo.*to_dense.*test_sparse_tensors\.py"):
        with xla_adapters.step():
            torch.sparse.mm(sparse, rows)
    assert rows.sum().item() == 6
