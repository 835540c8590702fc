"""Experts of fixed shape agree with transformers' own implementation."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from hf_trainer.experts import dense_experts_forward, experts_of_fixed_shape
from hf_trainer.framework_patches import as_if_compiling
from tests.isolation import isolated
from xla_adapters.sharding import Mesh, template
from xla_adapters.sharding.planner import Planner, Topology

_SIZES = {"hidden_size": 8, "intermediate_size": 6, "num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERTS = {
    "gated": lambda: MixtralExperts(transformers.MixtralConfig(**_SIZES)),
    "transposed, with bias": lambda: GptOssExperts(transformers.GptOssConfig(**_SIZES)),
}


@isolated
@pytest.mark.parametrize("name", _EXPERTS)
def test_values_and_gradients(name: str) -> None:
    torch.manual_seed(0)
    experts = _EXPERTS[name]()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    tokens = torch.randn(5, 8)
    # Expert 3 gets no token; expert 0 gets some twice.
    index = torch.tensor([[0, 1], [1, 0], [2, 0], [0, 2], [1, 2]])
    weights = torch.rand(5, 2)
    outcomes = []
    for forward in (batched_mm_experts_forward, dense_experts_forward):
        inputs = [tokens.clone().requires_grad_(), weights.clone().requires_grad_()]
        experts.zero_grad()
        output = forward(experts, inputs[0], index, inputs[1])
        output.square().sum().backward()
        outcomes.append([output.detach(), *(x.grad for x in inputs), *(p.grad.clone() for p in experts.parameters())])
    for expected, actual in zip(*outcomes, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@isolated
def test_an_id_beyond_the_last_expert_chooses_none() -> None:
    torch.manual_seed(0)
    experts = _EXPERTS["gated"]()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    tokens, weights = torch.randn(2, 8), torch.ones(2, 2)
    both = dense_experts_forward(experts, tokens, torch.tensor([[1, 4], [2, 9]]), weights)
    first = dense_experts_forward(experts, tokens, torch.tensor([[1], [2]]), weights[:, :1])
    torch.testing.assert_close(both, first)


def test_the_registry_is_as_before_afterwards() -> None:
    before = dict(ALL_EXPERTS_FUNCTIONS)
    with experts_of_fixed_shape():
        assert ALL_EXPERTS_FUNCTIONS["grouped_mm"] is dense_experts_forward
        with experts_of_fixed_shape():
            assert ALL_EXPERTS_FUNCTIONS["grouped_mm"] is dense_experts_forward
        assert ALL_EXPERTS_FUNCTIONS["grouped_mm"] is dense_experts_forward
    assert dict(ALL_EXPERTS_FUNCTIONS) == before
    assert not ALL_EXPERTS_FUNCTIONS._local_mapping


@isolated
def test_the_planner_plans_for_the_experts_that_are_computed() -> None:
    config = transformers.MixtralConfig(
        **_SIZES, vocab_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
    )
    model, tokens = transformers.MixtralForCausalLM(config), torch.zeros(8, 16, dtype=torch.long)
    plan = template("dp", model, Mesh.data_and_model(8, 1))
    batch = {"input_ids": tokens, "labels": tokens}
    (cost,) = Planner.begin(model, batch, topology=Topology.preset("cpu"), around=as_if_compiling).costs([plan])
    numbers = sum(parameter.numel() for parameter in model.parameters())
    # Gradients and the loss, summed over a ring of 8; tokens are not sent to their experts.
    assert cost.wire_bytes == pytest.approx(2 * 4 * (numbers + 1) * 7 / 8, rel=1e-3)
