"""`bounds`: times that bound a compiled step, from its amounts and the published figures of the device."""

from __future__ import annotations

import dataclasses

from xla_adapters.preflight.compiler import CompiledModule
from xla_adapters.preflight.report import StepTime
from xla_adapters.sharding.candidates import collective_seconds
from xla_adapters.sharding.plan import ShardingPlan
from xla_adapters.sharding.plan_data import CollectiveCost
from xla_adapters.sharding.planner import Topology


def bounds(compiled: CompiledModule, plan: ShardingPlan) -> tuple[tuple[CollectiveCost, ...], StepTime]:
    """The collectives of a step by kind and mesh axis, with their times; and the times that bound the step.

    Args:
        compiled: a step with collectives.
        plan: how it is sharded.
    """
    assert compiled.collectives is not None
    topology = Topology.preset(compiled.target.generation)
    costs = tuple(
        dataclasses.replace(item, seconds=collective_seconds(item, plan.mesh, topology))
        for item in compiled.collectives.costs(plan.mesh)
    )
    time = StepTime(
        compute=compiled.flops / topology.flops,
        memory=compiled.bytes_accessed / topology.memory_bandwidth,
        interconnect=sum(item.seconds for item in costs),
    )
    return costs, time
