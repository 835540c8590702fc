"""Questions about values that torch's own Python asks inside a step: answered without a read."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import distributions as d
from torch import nn

import xla_adapters
from tests.isolation import isolated

_DISTRIBUTIONS: dict[str, Callable[[torch.Tensor], d.Distribution]] = {
    "categorical": lambda x: d.Categorical(logits=x),
    "normal": lambda x: d.Normal(x, x.exp()),
    "independent": lambda x: d.Independent(d.Normal(x, x.exp()), 1),
    "transformed": lambda x: d.TransformedDistribution(d.Normal(x, x.exp()), [d.TanhTransform(cache_size=1)]),
    "mixture": lambda x: d.MixtureSameFamily(d.Categorical(logits=x), d.Normal(x, x.exp())),
    "asked for": lambda x: d.Bernoulli(logits=x, validate_args=True),
}


@isolated
@pytest.mark.parametrize("name", _DISTRIBUTIONS)
def test_distributions(name: str) -> None:
    make = _DISTRIBUTIONS[name]
    values = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    drawn = make(values).sample()
    xla_adapters.initialize()
    ours, plain = nn.Parameter(values.to("xla")), nn.Parameter(values)
    on_device = drawn.to("xla")
    with xla_adapters.count() as counted, xla_adapters.step():
        loss = -make(ours).log_prob(on_device).mean()
        loss.backward()
    assert (counted.executions, counted.transfers_to_host) == (1, 0)
    expected = -make(plain).log_prob(drawn).mean()
    expected.backward()
    torch.testing.assert_close(loss.detach().cpu(), expected.detach())
    torch.testing.assert_close(ours.grad.cpu(), plain.grad)


@isolated
def test_outside_of_steps_distributions_check_their_arguments() -> None:
    xla_adapters.initialize()
    with pytest.raises(ValueError, match="Expected parameter scale"):
        d.Normal(torch.zeros(2, device="xla"), torch.tensor([1.0, -1.0]).to("xla"))


@isolated
def test_other_code_that_asks_whether_all_is_true_reads() -> None:
    xla_adapters.initialize()
    weight = torch.ones(2, device="xla")
    with pytest.raises(xla_adapters.TensorReadError), xla_adapters.step():
        if torch._is_all_true(weight * 2 > 1):
            weight.add_(1)


@isolated
@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_with_a_padding_mask_in_evaluation(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first)
    plain = nn.TransformerEncoder(layer, 2).eval()
    values, padded = torch.randn(3, 5, 8), torch.zeros(3, 5, dtype=torch.bool)
    padded[1, 3:] = padded[2, 1:] = True
    xla_adapters.initialize()
    ours, batch = copy.deepcopy(plain).to("xla"), (values.to("xla"), padded.to("xla"))
    with torch.no_grad():
        with xla_adapters.count() as counted, xla_adapters.step():
            result = ours(batch[0], src_key_padding_mask=batch[1])
        expected = plain(values, src_key_padding_mask=padded)
    assert (counted.executions, counted.transfers_to_host) == (1, 0)
    torch.testing.assert_close(result.cpu()[~padded], expected[~padded])
