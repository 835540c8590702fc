"""`annotated`: what the user cut before any plan was made, told from the tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from xla_adapters.backend import Backend, Tiles
from xla_adapters.errors import ConfigError
from xla_adapters.sharding.config import ShardingConfig
from xla_adapters.sharding.mesh import DimSpec, Mesh, Spec
from xla_adapters.sharding.templates import default_mesh
from xla_adapters.sharding.tiling import tiles_of


def annotated(model: torch.nn.Module, meshes: Sequence[Mesh], backend: Backend) -> tuple[Mesh | None, dict[str, Spec]]:
    """The parameters that are cut already, and the first of the meshes that they are cut for; None if none is cut.

    Args:
        model: on any device.
        meshes: that they may be cut for.
        backend: the seam.

    Raises:
        ConfigError: they are cut for none of them.
    """
    cut = {
        name: tiles
        for name, parameter in model.named_parameters()
        if backend.is_backend_tensor(parameter) and (tiles := backend.tiles_of(parameter)) is not None
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
    """The meshes a user may have had in mind who gave these options."""
    if (asked := config.mesh(devices)) is not None:
        return [asked]
    if config.scheme != "auto":
        return [default_mesh(config.scheme, devices)]
    first = [default_mesh(scheme, devices) for scheme in ("2d", "fsdp", "tp")]
    lengths = (length for length in range(2, devices) if devices % length == 0)
    return list(dict.fromkeys([*first, *(Mesh.data_and_model(devices // n, n) for n in lengths)]))


def spec_of(mesh: Mesh, tiles: Tiles) -> Spec | None:
    """The spec that cuts a tensor so on this mesh, or None if there is none."""
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
