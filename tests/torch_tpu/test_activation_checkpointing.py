"""Activation checkpointing in a step on TorchTPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import xla_adapters
from tests.isolation import isolated
from xla_adapters import UnsupportedOptionError


def _gradients(dropout: float, *, checkpointed: bool, reentrant: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout), nn.Linear(8, 8)).to("tpu")
    batch = torch.randn(4, 8).to("tpu").requires_grad_()
    with xla_adapters.step():
        result = checkpoint(model, batch, use_reentrant=reentrant) if checkpointed else model(batch)
        result.square().sum().backward()
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


@isolated
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_are_the_same(reentrant: bool) -> None:
    xla_adapters.initialize()
    ours = _gradients(0.0, checkpointed=True, reentrant=reentrant)
    plain = _gradients(0.0, checkpointed=False, reentrant=reentrant)
    assert len(ours) == 4
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)


@isolated
@pytest.mark.parametrize("reentrant", [False, True])
def test_refused_where_the_recomputation_would_draw_other_numbers(reentrant: bool) -> None:
    xla_adapters.initialize()
    with pytest.raises(UnsupportedOptionError, match=r"(?s)draws random.*test_activation_checkpointing\.py:\d+"):
        _gradients(0.5, checkpointed=True, reentrant=reentrant)
