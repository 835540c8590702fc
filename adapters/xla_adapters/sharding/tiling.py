"""`tiles_of`: converts a spec to XLA's tile assignment; `tiles_of_plan`: all of those of a plan."""

from __future__ import annotations

import math
from collections.abc import Hashable

from xla_adapters.runtime import TileAssignment
from xla_adapters.sharding.mesh import Mesh, Spec, axes_of
from xla_adapters.sharding.plan_data import PlanData


def tiles_of(mesh: Mesh, spec: Spec) -> TileAssignment:
    """The tile assignment of a tensor with this spec: number of tiles per dimension, and the device of each tile."""
    used = [mesh.axis_names.index(axis) for dim in spec for axis in axes_of(dim)]
    order = used + [index for index in range(len(mesh.shape)) if index not in used]
    strides = [math.prod(mesh.shape[index + 1 :]) for index in range(len(mesh.shape))]
    devices = [0]
    for index in order:
        devices = [start + step * strides[index] for start in devices for step in range(mesh.shape[index])]
    return TileAssignment(counts=tuple(mesh.parts(dim) for dim in spec), devices=tuple(devices))


def tiles_of_plan(plan: PlanData) -> Hashable:
    """All tile assignments of a plan. Plans of one model with equal ones compile to the same step."""
    mesh = plan.mesh
    stored = tuple(tiles_of(mesh, spec) for entry in plan.parameters for spec in (entry.spec, entry.spec_in_use))
    held = tuple(
        (entry.module, entry.of, tiles_of(mesh, entry.spec), tiles_of(mesh, entry.gradient or entry.spec))
        for entry in plan.activations
    )
    return stored, held, tiles_of(mesh, (plan.batch,))
