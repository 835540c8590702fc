"""What a plan relies on is held: what modules take, and parameters that are used whole."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from benchmarks.sizes import of_real_size, to_shard
from hf_trainer.patches import as_if_compiling
from tests.isolation import isolated
from tests.sharding.planner.models import evaluate, plan_model
from xla_adapters.sharding import ActivationPlan, Mesh, ParameterPlan, ShardingConfig, ShardingPlan
from xla_adapters.sharding.measure import PlanResult, measure_plans
from xla_adapters.sharding.mesh import DATA, Spec, used_axes
from xla_adapters.sharding.planner import Topology
from xla_adapters.sharding.planner.costs import Fabric
from xla_adapters.sharding.planner.graph import Operand, Operator
from xla_adapters.sharding.planner.layouts import Want, reshard

_CPU = Topology.preset("cpu")
_MODEL = Mesh.data_and_model(1, 8)


class _Two(nn.Module):
    """Two layers without biases; 16 rows of 8 places of 64 numbers are 32 kB."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).square().mean()


def _plan(second: Spec, *held: ActivationPlan, used: Spec | None = None) -> ShardingPlan:
    """The first layer works on an eighth of the rows; the second's weight is split."""
    rows = ((DATA, "model"), None, None)
    return ShardingPlan(
        name="planner",
        mesh=_MODEL,
        parameters=(
            ParameterPlan(name="first.weight", shape=(64, 64), dtype="float32", spec=(None, None)),
            ParameterPlan(name="second.weight", shape=(64, 64), dtype="float32", spec=second, used=used),
        ),
        batch=(DATA, "model"),
        activations=(ActivationPlan(module="first", spec=rows), *held),
    )


_WEIGHT, _VALUES = 64 * 64 * 4, 16 * 8 * 64 * 4
_ROWS = ActivationPlan(module="second", spec=((DATA, "model"), None, None))
_PARTS = ActivationPlan(module="second", spec=(DATA, None, "model"), of="input")
_WHOLE = ActivationPlan(module="second", spec=(DATA, None, None))
PLANS = {
    "gathers the weight": _plan((None, "model"), _ROWS, used=(None, None)),
    "sums up parts": _plan((None, "model"), _WHOLE, _PARTS),
}


@pytest.fixture(scope="module")
def compiled() -> dict[str, PlanResult]:
    results = measure_plans(_Two(), (torch.empty(16, 8, 64),), list(PLANS.values()))
    return dict(zip(PLANS, results, strict=True))


def _sent(result: PlanResult, kind: str) -> float:
    assert not result.problem
    return sum(item.wire_bytes for item in result.collectives if item.kind == kind)


def test_a_weight_that_is_taken_whole_is_gathered_and_nothing_else(compiled: dict[str, PlanResult]) -> None:
    result = compiled["gathers the weight"]
    assert _sent(result, "all-gather") == _WEIGHT * 7 / 8
    # The gradients of both weights; of values only the loss.
    assert _sent(result, "all-reduce") == pytest.approx(2 * 2 * _WEIGHT * 7 / 8, abs=64)
    assert _sent(result, "all-to-all") == 0


def test_what_a_module_takes_is_split_as_planned(compiled: dict[str, PlanResult]) -> None:
    """Its rows are exchanged for parts of them, forward and backward; the products of parts are summed up."""
    result = compiled["sums up parts"]
    # With the mask of what was positive, a byte each.
    assert _sent(result, "all-to-all") == pytest.approx(2 * _VALUES * 7 / 64, abs=_VALUES / 4 * 7 / 64)
    assert _sent(result, "all-reduce") == pytest.approx(2 * (_VALUES + _WEIGHT) * 7 / 8, abs=64)
    assert _sent(result, "all-gather") == 0


@isolated
@pytest.mark.parametrize("name", PLANS)
def test_both_are_evaluated_as_they_run(name: str, compiled: dict[str, PlanResult]) -> None:
    said = evaluate(PLANS[name], _Two(), (torch.empty(16, 8, 64),), topology=_CPU)
    measurement = compiled[name].measurement
    assert measurement is not None
    assert said.wire_bytes == pytest.approx(measurement.wire_bytes, rel=0.02)


@isolated
@pytest.mark.parametrize("kind", ["v5e", "cpu"])
def test_on_tpus_a_gradient_returns_to_the_layout_of_what_makes_its_value(kind: str) -> None:
    """`down_proj` adds up products of parts, and scatters the sum: it needs the gradient of all samples."""
    model, batch = of_real_size("llama-1b", 2)
    plans = plan_model(
        model, batch, mesh=Mesh.data_and_model(2, 4), devices=8, config=ShardingConfig(),
        topology=Topology.preset(kind), around=as_if_compiling,
    )  # fmt: skip
    held = [item for plan in plans for item in plan.activations if item.gradient is not None]
    assert all("model" in used_axes(item.spec) and item.gradient != item.spec for item in held)
    rows: Spec = ((DATA, "model"), None, None)
    down = {item.gradient for item in held if item.module.endswith("down_proj") and item.spec == rows}
    assert down == ({(DATA, None, None)} if kind == "v5e" else set())


@isolated
def test_copies_for_experts_need_all_rows() -> None:
    """Of rows that are split to experts that are: gathered; each device has a part of their gradient."""
    fabric = Fabric(mesh=_MODEL, topology=dataclasses.replace(_CPU, reduce_scatter=True))
    source = Operator(
        index=0, target="mul", namespace="aten", args=(), kwargs={}, operands=(), shape=(64, 32), batch=0,
        size=64 * 32 * 4.0, modules=(), pointwise=True,
    )  # fmt: skip
    copies = Operand(shape=(8, 64, 32), batch=1, size=8 * source.size, source=0, dims=(1, 2))
    found = reshard(fabric, source, copies, 0, Want(state=0))
    assert [(charge.kind, charge.wire_bytes) for charge in found.forward] == [("all-gather", source.size * 7 / 8)]
    assert [(charge.kind, charge.wire_bytes) for charge in found.backward] == [("reduce-scatter", source.size * 7 / 8)]
    assert found.sums


@isolated
def test_a_module_that_wants_a_value_otherwise_than_another_is_held() -> None:
    """Of the two convolutions that a stage of a ResNet begins with, one takes the rows as they are split, one not."""
    model, batch = to_shard("resnet", width=256)
    (plan, *_) = plan_model(
        model, batch, mesh=_MODEL, devices=8, config=ShardingConfig(), topology=_CPU, around=as_if_compiling
    )
    held = {(item.module, item.of): item.spec for item in plan.activations}
    inputs = {module: spec for (module, of), spec in held.items() if of == "input"}
    assert inputs
    for spec in inputs.values():
        assert len(spec) == 4
        assert spec != ((DATA, "model"), None, None, None)


@isolated
@pytest.mark.parametrize(("rows", "used"), [(1024, (None, None)), (8, None)])
def test_a_weight_that_is_stored_in_parts_is_taken_whole_where_that_is_cheaper(rows: int, used: Spec | None) -> None:
    """Than to sum up what its parts give, for so many rows."""
    plans = plan_model(
        _Two(),
        (torch.empty(rows, 64),),
        mesh=_MODEL,
        devices=8,
        config=ShardingConfig(),
        topology=dataclasses.replace(_CPU, latency=0.0),
        fixed={"second.weight": (None, "model")},
    )
    assert plans[0].parameter("second.weight").used == used


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gpt2", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("mixtral", "llama", "bert", "vit", "resnet")),
    ],
)
@isolated(timeout=500)
def test_predictions_are_what_the_compiled_steps_send(name: str) -> None:
    model, batch = to_shard(name, width=128)
    plans = plan_model(
        model, batch, mesh=None, devices=8, config=ShardingConfig(), topology=_CPU, around=as_if_compiling
    )[:2]
    for plan, result in zip(plans, measure_plans(model, batch, plans, around=as_if_compiling), strict=True):
        assert plan.predicted is not None
        assert result.measurement is not None, result.problem
        assert plan.predicted.wire_bytes == pytest.approx(result.measurement.wire_bytes, rel=0.1), plan.mesh
