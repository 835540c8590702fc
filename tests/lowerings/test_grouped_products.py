"""Matrix products of groups of rows, as the mixtures of experts of transformers call them."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import xla_adapters
from tests.isolation import isolated
from xla_adapters.replay.compiled_step import CompiledStep


def _model() -> torch.nn.Module:
    config = transformers.Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(config)


def _losses(model: torch.nn.Module, device: str) -> list[float]:
    model = copy.deepcopy(model).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ids = torch.randint(0, 32, (2, 12), generator=torch.Generator().manual_seed(1)).to(device)

    def train(ids: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = train if device == "cpu" else CompiledStep(train)
    return [float(run(ids)) for _ in range(4)]


@isolated
def test_experts_train_in_one_graph_in_a_loop_of_ones_own() -> None:
    xla_adapters.initialize()
    model = _model()
    expected = _losses(model, "cpu")
    # The default of on_graph_break is to raise.
    assert _losses(model, "xla") == pytest.approx(expected, abs=1e-4)


@isolated
def test_groups_of_rows() -> None:
    """Also an empty group, and rows behind the last one."""
    xla_adapters.initialize()
    rows, weight = torch.randn(7, 3), torch.randn(4, 3, 5)
    ends = torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    expected = torch.zeros(7, 5)
    for index, (start, end) in enumerate(((0, 2), (2, 2), (2, 5), (5, 6))):
        expected[start:end] = rows[start:end] @ weight[index]
    x, w = rows.to("xla").requires_grad_(), weight.to("xla").requires_grad_()
    with xla_adapters.step():
        found = torch._grouped_mm(x, w, offs=ends.to("xla"))
        found.sum().backward()
    torch.testing.assert_close(found.detach().cpu(), expected, rtol=1e-4, atol=1e-5)
    assert w.grad is not None
    assert not w.grad[1].cpu().any()
    torch.testing.assert_close(w.grad[3].cpu(), rows[5:6].sum(0)[:, None].expand(3, 5), rtol=1e-4, atol=1e-5)
