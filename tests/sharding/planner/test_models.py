"""Every family of models is planned: all specs divide, ties are kept, the same twice, on all meshes."""

from __future__ import annotations

import warnings

import pytest

from tests.sharding.planner.models import MODELS
from xla_adapters.sharding import Mesh, ShardingConfig
from xla_adapters.sharding.planner import Topology, evaluate_all, plan_model

pytestmark = pytest.mark.isolated

_MESH = Mesh.data_and_model(2, 4)
_CPU = Topology.preset("cpu")


@pytest.mark.parametrize(
    "name", [name if name in ("llama", "resnet") else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_plans(name: str) -> None:
    make, batch = MODELS[name]
    model = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        # All meshes of four devices; and one that is given.
        plans = plan_model(model, batch(), mesh=None, devices=4, config=ShardingConfig(), topology=_CPU)
        given = plan_model(model, batch(), mesh=_MESH, devices=8, config=ShardingConfig(), topology=_CPU)
    assert {plan.mesh for plan in given} == {_MESH}
    modules = dict(model.named_modules())
    for plan in [*plans, *given]:
        plan.check()
        assert plan.notes == ()
        assert plan.mesh.size == (4 if plan in plans else 8)
        assert [entry.name for entry in plan.parameters] == [key for key, _ in model.named_parameters()]
        assert {item.module for item in plan.activations} <= set(modules)
        assert plan.predicted is not None
        assert plan.predicted.step_seconds > 0
        kinds = {"activations", "batch", "gradients", "optimizer", "parameters"}
        assert kinds <= set(plan.predicted.memory) <= {*kinds, "gathered"}
    seconds = [plan.predicted.step_seconds for plan in plans if plan.predicted is not None]
    assert seconds == sorted(seconds)
    again = plan_model(make(), batch(), mesh=_MESH, devices=8, config=ShardingConfig(), topology=_CPU)
    assert again == given


@pytest.mark.parametrize("name", ["llama", "gpt2", "resnet"])
def test_plans_are_evaluated_as_they_were_predicted(name: str) -> None:
    make, batch = MODELS[name]
    model = make()
    plans = plan_model(model, batch(), mesh=_MESH, devices=8, config=ShardingConfig(), topology=_CPU)
    for plan, cost in zip(plans, evaluate_all(plans, model, batch(), topology=_CPU), strict=True):
        assert plan.predicted is not None
        assert cost.step_seconds == pytest.approx(plan.predicted.step_seconds, rel=1e-3)


def test_tied_weights_are_one_entry() -> None:
    make, batch = MODELS["gpt2"]
    (plan, *_) = plan_model(make(), batch(), mesh=_MESH, devices=8, config=ShardingConfig(), topology=_CPU)
    (entry,) = [item for item in plan.parameters if item.name == "transformer.wte.weight"]
    assert entry.tied == ("lm_head.weight",)
    assert plan.spec_of("lm_head.weight") == entry.spec
