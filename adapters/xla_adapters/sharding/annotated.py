"""`annotated`: reads the sharding of parameters that the user annotated before a plan is made."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from xla_adapters.errors import ConfigError
from xla_adapters.runtime import Runtime, TileAssignment
from xla_adapters.sharding.config import ShardingConfig
from xla_adapters.sharding.mesh import DimSpec, Mesh, Spec
from xla_adapters.sharding.templates import default_mesh
from xla_adapters.sharding.tiling import tiles_of


def annotated(model: torch.nn.Module, meshes: Sequence[Mesh], runtime: Runtime) -> tuple[Mesh | None, dict[str, Spec]]:
    """The mesh and the specs of the parameters that are already sharded.

    Args:
        model: on any device.
        meshes: the candidates; the first that explains all annotations is returned.
        runtime: the runtime.

    Returns:
        The mesh (None if no parameter is sharded), and the spec of each sharded parameter by name.

    Raises:
        ConfigError: no candidate explains all annotations.
    """
    cut = {
        name: tiles
        for name, parameter in model.named_parameters()
        if runtime.device.owns(parameter) and (tiles := runtime.spmd.tiles_of(parameter)) is not None
    }
    if not cut:
        return None, {}
    odd: set[str] = set()
    for mesh in meshes:
        specs = {name: spec_of(mesh, tiles) for name, tiles in cut.items()}
        found = {name: spec for name, spec in specs.items() if spec is not None}
        if len(found) == len(cut):
            return mesh, found
        odd |= cut.keys() - found.keys()
    raise ConfigError(
        f"the annotations of {', '.join(sorted(odd)[:3])}{' and others' if len(odd) > 3 else ''} are none of the "
        f"mesh {', or '.join(map(str, meshes))}: give the mesh they were made for as mesh_shape and axis_names (or as "
        "device_mesh), or keep_user_sharding=False to shard them anew"
    )


def possible_meshes(config: ShardingConfig, devices: int) -> list[Mesh]:
    """The meshes that annotations of the user may belong to, given these options."""
    if (asked := config.mesh(devices)) is not None:
        return [asked]
    if config.scheme != "auto":
        return [default_mesh(config.scheme, devices)]
    first = [default_mesh(scheme, devices) for scheme in ("2d", "fsdp", "tp")]
    lengths = (length for length in range(2, devices) if devices % length == 0)
    return list(dict.fromkeys([*first, *(Mesh.data_and_model(devices // n, n) for n in lengths)]))


def spec_of(mesh: Mesh, tiles: TileAssignment) -> Spec | None:
    """The spec on this mesh that gives this tile assignment; None if there is none."""
    choices: list[list[DimSpec]] = []
    for count in tiles.counts:
        ways: list[DimSpec] = [None] if count == 1 else []
        for length in range(1, len(mesh.axis_names) + 1):
            for axes in itertools.permutations(mesh.axis_names, length):
                if mesh.parts(axes) == count:
                    ways.append(axes[0] if length == 1 else axes)
        choices.append(ways)
    for spec in itertools.product(*choices):
        used = [axis for dim in spec if dim is not None for axis in ((dim,) if isinstance(dim, str) else dim)]
        if len(set(used)) == len(used) and tiles_of(mesh, spec) == tiles:
            return spec
    return None
