"""How plans are compared: by predicted time and memory, and by what they split."""

from __future__ import annotations

from xla_adapters.sharding.mesh import MODEL, used_axes
from xla_adapters.sharding.plan import ShardingPlan


def memory_of(plan: ShardingPlan) -> float:
    """The predicted bytes on a device; 0 if there is no prediction."""
    return plan.predicted.memory_bytes if plan.predicted is not None else 0.0


def is_idle(plan: ShardingPlan) -> bool:
    """Whether the mesh has a model axis over which nothing is split."""
    specs = [item.spec for item in plan.parameters] + [item.spec for item in plan.activations] + [plan.batch]
    split = {axis for spec in specs for axis in used_axes(spec)}
    return plan.mesh.axis_size(MODEL) > 1 and MODEL not in split


def are_same(one: ShardingPlan, other: ShardingPlan) -> bool:
    """Whether two plans split the same in the same way."""
    return (one.parameters, one.batch, one.activations) == (other.parameters, other.batch, other.activations)


def by_time(plan: ShardingPlan) -> tuple[float, int, tuple[int, ...]]:
    """A sort key: the predicted time to six digits, then the number of constraints."""
    seconds = plan.predicted.step_seconds if plan.predicted is not None else 0.0
    return (float(f"{seconds:.6g}"), len(plan.activations), tuple(-size for size in plan.mesh.shape))
