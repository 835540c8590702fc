"""`tiles_of`: converts a spec to XLA's tile assignment."""

from __future__ import annotations

import math

from xla_adapters.runtime import TileAssignment
from xla_adapters.sharding.mesh import Mesh, Spec, axes_of


def tiles_of(mesh: Mesh, spec: Spec) -> TileAssignment:
    """The tile assignment of a tensor with this spec: number of tiles per dimension, and the device of each tile."""
    used = [mesh.axis_names.index(axis) for dim in spec for axis in axes_of(dim)]
    order = used + [index for index in range(len(mesh.shape)) if index not in used]
    strides = [math.prod(mesh.shape[index + 1 :]) for index in range(len(mesh.shape))]
    devices = [0]
    for index in order:
        devices = [start + step * strides[index] for start in devices for step in range(mesh.shape[index])]
    return TileAssignment(counts=tuple(mesh.parts(dim) for dim in spec), devices=tuple(devices))
