"""The automatic plan: the cheapest of planner and recipes, within the device's memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.sizes import to_shard
from hf_trainer.framework_patches import as_if_compiling
from tests.isolation import isolated
from xla_adapters.errors import ConfigError
from xla_adapters.sharding import Measurement, Mesh, ShardingConfig, automatic
from xla_adapters.sharding.candidates import Candidate, distinct
from xla_adapters.sharding.planner import evaluate
from xla_adapters.sharding.planner.topology import Topology
from xla_adapters.sharding.sharder import make_plan
from xla_adapters.sharding.templates import default_mesh, template


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(inputs))).square().mean()


def plan_for(width: int, rows: int, **options: Any) -> tuple[Any, nn.Module, dict[str, torch.Tensor]]:
    with torch.device("meta"):
        model = Net(width)
    batch = {"inputs": torch.empty(rows, width, device="meta")}
    config = ShardingConfig(**{"topology": "v5e", **options})
    return make_plan(model, config, 8, example=lambda: batch), model, batch


@isolated
@pytest.mark.parametrize(("width", "rows"), [(64, 4096), (1024, 64), (4096, 16)])
def test_no_recipe_is_predicted_to_be_cheaper(width: int, rows: int) -> None:
    plan, model, batch = plan_for(width, rows)
    topology = Topology.preset("v5e")
    assert plan.predicted is not None
    for scheme in ("dp", "fsdp", "tp", "2d"):
        recipe = template(scheme, model, default_mesh(scheme, 8))
        predicted = evaluate(recipe, model, batch, topology=topology)
        assert plan.predicted.step_seconds <= predicted.step_seconds * (1 + 1e-6), scheme


@isolated
def test_the_mesh_that_was_asked_for_is_used() -> None:
    plan, _, _ = plan_for(256, 64, mesh_shape=(2, 4))
    assert plan.mesh == Mesh.data_and_model(2, 4)


@isolated
def test_without_a_budget_the_devices_memory_is_one() -> None:
    # 24 GB of state, of which a v5e has 16: no device can hold it whole.
    plan, model, _ = plan_for(14000, 8)
    assert 16 * sum(parameter.numel() for parameter in model.parameters()) > 16 * 2**30
    assert plan.predicted.memory_bytes <= 0.9 * 16 * 2**30
    assert all(plan.mesh.shards(entry.spec) > 1 for entry in plan.parameters if len(entry.shape) == 2)
    with pytest.raises(ConfigError, match="too little"):
        plan_for(100_000, 8)


@isolated
def test_where_a_recipe_beats_the_plans_those_that_gspmd_follows_by_itself_compete() -> None:
    rounds: list[list[Any]] = []
    model, batch = to_shard("gpt2", width=32)

    def compiled(plans: Any, *_: Any) -> list[Candidate]:
        # All recipes take a second, what is planned first two, and of what is planned then the first one half.
        rounds.append(list(plans))
        cost = [1.0 if plan.name != "planner" else 2.0 if len(rounds) == 1 else 0.5 + n for n, plan in enumerate(plans)]
        return [Candidate(plan=plan, seconds=item, memory_bytes=1.0) for plan, item in zip(plans, cost, strict=True)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(automatic, "measured", compiled)
        plan = make_plan(model, ShardingConfig(), 8, example=lambda: batch, around=as_if_compiling)
        first, second = rounds
        assert second
        assert all(item.name == "planner" for item in second)
        assert (plan.mesh, plan.parameters) == (second[0].mesh, second[0].parameters)
        assert distinct([*first, *second]) == [*first, *second]
        rounds.clear()
        # With a budget, plans are corrected for it instead; what was not measured corrects nothing.
        config = ShardingConfig(memory_budget=10**9)
        plan = make_plan(model, config, 8, example=lambda: batch, around=as_if_compiling)
        assert len(rounds) == 2
        assert all(item.name == "planner" for item in rounds[1])
        assert plan.name != "planner"


@isolated
def test_with_a_budget_plans_are_tried_until_none_promises_to_be_faster() -> None:
    """Each takes more memory than was said: what fits in the end was planned for less."""
    rounds: list[list[Any]] = []
    model, batch = to_shard("gpt2", width=128)

    def compiled(plans: Any, *_: Any) -> list[Candidate]:
        rounds.append(list(plans))
        found = []
        for plan in plans:
            said = plan.predicted
            more = said.memory_bytes + (4e6 if plan.name == "planner" else 0.0)
            done = dataclasses.replace(plan, measured=Measurement(wire_bytes=said.wire_bytes, memory_bytes=int(more)))
            # A recipe is slower than any plan.
            seconds = said.step_seconds + (plan.name != "planner")
            found.append(Candidate(plan=done, seconds=seconds, memory_bytes=more))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(automatic, "measured", compiled)
        config = ShardingConfig(memory_budget=30 * 10**6)
        plan = make_plan(model, config, 8, example=lambda: batch, around=as_if_compiling)
    tried = [item for plans in rounds for item in plans]
    assert distinct(tried) == tried
    assert 2 <= len(rounds) <= 5
    assert all(len(plans) <= 4 for plans in rounds[1:])
    assert plan.name == "planner"
    assert plan.predicted is not None
    assert plan.predicted.memory_bytes + 4e6 <= 30e6
    (fits,) = [item for item in tried if (item.mesh, item.parameters) == (plan.mesh, plan.parameters)][:1]
    assert fits not in rounds[0]
