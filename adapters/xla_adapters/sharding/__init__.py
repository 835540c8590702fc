"""Sharding: how a step is split over the devices of a mesh."""

from xla_adapters.sharding.config import ShardingConfig
from xla_adapters.sharding.mesh import Mesh
from xla_adapters.sharding.plan import (
    ActivationPlan,
    Alternative,
    CollectiveCost,
    Measurement,
    ParameterPlan,
    PlanCost,
    ShardingPlan,
)

__all__ = [
    "ActivationPlan",
    "Alternative",
    "CollectiveCost",
    "Measurement",
    "Mesh",
    "ParameterPlan",
    "PlanCost",
    "ShardingConfig",
    "ShardingPlan",
]
