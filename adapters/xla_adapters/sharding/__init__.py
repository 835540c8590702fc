"""Sharding: splits a training step over the devices of a mesh (GSPMD).

A `ShardingPlan` (plan.py) says how each tensor is split. It comes from a template (templates.py) or from the planner
(planner/), possibly compared by compiled steps (measure/, automatic.py). `Placement` (placement.py) applies it to a
model; state/ saves and loads sharded state; report.py, visualize.py and hlo.py show what a plan does.
"""

from xla_adapters.sharding.config import ShardingConfig
from xla_adapters.sharding.mesh import Mesh
from xla_adapters.sharding.plan import ShardingPlan
from xla_adapters.sharding.plan_data import (
    ActivationPlan,
    Alternative,
    CollectiveCost,
    Measurement,
    ParameterPlan,
    PlanCost,
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
