"""Sharding: splits a training step over the devices of a mesh (GSPMD).

A `ShardingPlan` (plan.py) says how each tensor is split. It comes from a template (templates.py) or from the planner
(planner/), possibly compared by compiled steps (measure/, automatic.py). `Placement` (placement.py) applies it to a
model; state/ saves and loads sharded state; plan_report.py, visualize.py and communication_volume.py show what a plan
does.

With TorchTPU a process has one device: there `DataParallel` (data_parallel.py) has several processes train together.

Other rooms import from here, and from the rooms in this one: planner/ (which imports the solver), measure/ and state/.
"""

from xla_adapters.sharding.collectives import gathered_in_step, reduced_in_step
from xla_adapters.sharding.communication_volume import HloStats, read_hlo
from xla_adapters.sharding.config import MEASURED_PLANS, Scheme, ShardingConfig, TopologyName
from xla_adapters.sharding.data_parallel import DataParallel, launched_ranks, share_state
from xla_adapters.sharding.distribute import accept_placements, distribute_module, place_batch, plan_of
from xla_adapters.sharding.mesh import Mesh
from xla_adapters.sharding.model_loading import Around, checkpoint_activations, load_model
from xla_adapters.sharding.placement import Placement
from xla_adapters.sharding.plan import ShardingPlan
from xla_adapters.sharding.plan_data import (
    ActivationPlan,
    Alternative,
    CollectiveCost,
    Measurement,
    ParameterPlan,
    PlanCost,
)
from xla_adapters.sharding.plan_report import UNITS_NOTE, human_bytes, human_seconds, table
from xla_adapters.sharding.sharder import Sharder, make_plan
from xla_adapters.sharding.shards import for_first_rank, own_shard, whole_parameters
from xla_adapters.sharding.templates import default_mesh, template

__all__ = [
    "MEASURED_PLANS",
    "UNITS_NOTE",
    "ActivationPlan",
    "Alternative",
    "Around",
    "CollectiveCost",
    "DataParallel",
    "HloStats",
    "Measurement",
    "Mesh",
    "ParameterPlan",
    "Placement",
    "PlanCost",
    "Scheme",
    "Sharder",
    "ShardingConfig",
    "ShardingPlan",
    "TopologyName",
    "accept_placements",
    "checkpoint_activations",
    "default_mesh",
    "distribute_module",
    "for_first_rank",
    "gathered_in_step",
    "human_bytes",
    "human_seconds",
    "launched_ranks",
    "load_model",
    "make_plan",
    "own_shard",
    "place_batch",
    "plan_of",
    "read_hlo",
    "reduced_in_step",
    "share_state",
    "table",
    "template",
    "whole_parameters",
]
