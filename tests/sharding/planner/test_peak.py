"""The predicted peak of a step's memory: what lives at once on a TPU, with padding, and what is freed before."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from tests.isolation import isolated
from tests.sharding.planner.models import evaluate_all, gpt2, llama, on_meta, plan_model, tokens
from xla_adapters.sharding import Mesh, PlanCost, ShardingConfig
from xla_adapters.sharding.planner import Topology
from xla_adapters.sharding.planner.memory import tiled
from xla_adapters.sharding.templates import template

_V5E = Topology.preset("v5e")


def _costs(model: nn.Module, batch: Any, topology: Topology, *schemes: str) -> list[PlanCost]:
    mesh = Mesh.data_and_model(8, 1)
    return evaluate_all([template(scheme, model, mesh) for scheme in schemes], model, batch, topology=topology)


@pytest.mark.parametrize(
    ("shape", "elements"),
    [((5,), 5), ((197, 197), 200 * 256), ((197, 64), 64 * 256), ((50257, 96), 96 * 50304), ((2, 8, 128), 2 * 8 * 128)],
)
def test_values_are_padded_in_their_better_order(shape: tuple[int, ...], elements: int) -> None:
    assert tiled(shape) == elements


@isolated
def test_activations_grow_with_the_layers_and_only_their_gradients_of_those_that_are_done_live() -> None:
    batch = tokens(16, 512)
    two, four, six = (_costs(llama(num_hidden_layers=number), batch, _V5E, "dp")[0] for number in (2, 4, 6))
    # At the loss all layers' activations live, so each pair of layers adds the same.
    more = four.memory["activations"] - two.memory["activations"]
    assert more > 0
    assert six.memory["activations"] - four.memory["activations"] == pytest.approx(more, rel=1e-6)
    assert two.memory["gradients"] == four.memory["gradients"] < two.memory["parameters"]


@isolated
def test_of_a_large_model_and_a_small_batch_all_gradients_live_at_the_peak() -> None:
    model = on_meta(lambda: nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4))))
    (cost,) = _costs(model, (torch.empty(8, 2048, device="meta"),), _V5E, "dp")
    assert cost.memory["gradients"] == cost.memory["parameters"]
    assert cost.memory["activations"] < cost.memory["parameters"] / 100


@isolated
def test_a_loop_keeps_two_accumulators_and_sends_one_shard_more_than_there_are() -> None:
    model = gpt2(n_embd=256, n_head=4)
    few, many = (_costs(model, tokens(8, 32), _V5E, "fsdp")[0], _costs(model, tokens(8192, 64), _V5E, "fsdp")[0])
    scatter = [
        next(item.wire_bytes for item in cost.collectives if item.kind == "reduce-scatter") for cost in (few, many)
    ]
    # Looped: 9/8 of the gradient are sent, not 7/8; not of those of norms and biases.
    assert 1.2 < scatter[1] / scatter[0] <= 9 / 7
    slow = dataclasses.replace(_V5E, flops=_V5E.flops * 1e3)
    (none,) = _costs(model, tokens(8192, 64), slow, "fsdp")
    assert next(item.wire_bytes for item in none.collectives if item.kind == "reduce-scatter") == scatter[0]
    assert many.memory["gradients"] > few.memory["gradients"]


@isolated
def test_a_budget_holds_for_the_peak() -> None:
    model, batch, mesh = llama(num_hidden_layers=4), tokens(64, 64), Mesh.data_and_model(4, 2)

    def planned(budget: int | None) -> list[PlanCost]:
        config = ShardingConfig(memory_budget=budget)
        plans = plan_model(model, batch, mesh=mesh, devices=8, config=config, topology=_V5E)
        return [plan.predicted or PlanCost() for plan in plans]

    free = planned(None)[0].memory_bytes
    budget = int(0.97 * free)
    tight = planned(budget)
    assert tight
    assert all(cost.memory_bytes <= budget for cost in tight)


@isolated
def test_for_cpu_devices_everything_is_kept() -> None:
    (cost,) = _costs(gpt2(), tokens(), Topology.preset("cpu"), "dp")
    # Of each parameter a gradient, and activations as a sum.
    assert cost.memory["gradients"] == cost.memory["parameters"]
