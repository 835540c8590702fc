"""Plans the tests describe and draw."""

from __future__ import annotations

from xla_adapters.sharding import (
    ActivationPlan,
    CollectiveCost,
    Measurement,
    Mesh,
    ParameterPlan,
    PlanCost,
    ShardingPlan,
)

PREDICTED = PlanCost(
    memory={"parameters": 12e6, "activations": 338e6},
    collectives=(
        CollectiveCost(kind="all-reduce", axis="data", count=9, wire_bytes=25e6, seconds=300e-6, cause="gradients"),
        CollectiveCost(kind="all-gather", axis="model", count=8, wire_bytes=5e6, seconds=100e-6, cause="activations"),
    ),
    compute_seconds=1.6e-3,
)
MEASURED = Measurement(wire_bytes=45e6, memory_bytes=420e6, collectives={"all-reduce": 18, "all-to-all": 2})


def make_plan(
    mesh: Mesh | None = None,
    *,
    layers: int = 4,
    odd: int = 2,
    predicted: PlanCost | None = PREDICTED,
    measured: Measurement | None = MEASURED,
    notes: tuple[str, ...] = ("a vocabulary of 50257 does not divide by 4: not split",),
) -> ShardingPlan:
    """A decoder whose layer `odd` has its first weight split otherwise."""
    parameters = [
        ParameterPlan(
            name="model.embed.weight",
            shape=(1024, 64),
            dtype="float32",
            spec=("model", None),
            tied=("lm_head.weight",),
            decided_by="user",
        )
    ]
    for index in range(layers):
        parameters += [
            ParameterPlan(
                name=f"model.layers.{index}.up.weight",
                shape=(4096, 1024),
                dtype="float32",
                spec=("model", "data") if index == odd else ("model", None),
            ),
            ParameterPlan(
                name=f"model.layers.{index}.down.weight", shape=(1024, 4096), dtype="float32", spec=(None, "model")
            ),
            ParameterPlan(name=f"model.layers.{index}.norm.weight", shape=(1024,), dtype="float32", spec=(None,)),
        ]
    return ShardingPlan(
        name="2d",
        mesh=mesh or Mesh.data_and_model(2, 4),
        parameters=tuple(parameters),
        batch=("data",),
        activations=tuple(
            ActivationPlan(module=f"model.layers.{index}", spec=("data", None, None)) for index in range(layers)
        ),
        predicted=predicted,
        measured=measured,
        notes=notes,
    )
