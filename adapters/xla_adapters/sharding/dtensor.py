"""Models that carry placements already: DTensors of torch, and the wrappers of torch_xla's own annotations."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from xla_adapters.backend import Tiles, get_backend
from xla_adapters.errors import ConfigError
from xla_adapters.sharding.mesh import DimSpec, Mesh, Spec
from xla_adapters.sharding.tiling import tiles_of


def accept_placements(model: torch.nn.Module) -> list[str]:
    """Makes plain parameters of those that are DTensors: on the devices, cut as they were placed.

    A plan that is made afterwards keeps them so (`keep_user_sharding`). What is placed as a copy on every device is
    open to the plan. Works in place; an optimizer that was made before would go on to update the former parameters.

    Args:
        model: its DTensors may be torch's own (on a mesh of as many devices as there are here; brought together by a
            collective if other processes hold parts) or come from `distribute_tensor` on an `"xla"` mesh.

    Returns:
        The names of the parameters and buffers that were DTensors.

    Raises:
        ConfigError: a DTensor has no values, is a partial sum, or lies on a mesh of another size.
    """
    made: dict[int, torch.Tensor] = {}
    names: list[str] = []
    for prefix, module in model.named_modules():
        for own in (module._parameters, module._buffers):
            for key, value in own.items():
                if not isinstance(value, DTensor):
                    continue
                names.append(f"{prefix}.{key}" if prefix else key)
                if id(value) not in made:
                    plain = _plain(names[-1], value)
                    is_parameter = own is module._parameters
                    made[id(value)] = (
                        torch.nn.Parameter(plain, requires_grad=value.requires_grad) if is_parameter else plain
                    )
                own[key] = made[id(value)]
    return names


def _plain(name: str, value: DTensor) -> torch.Tensor:
    backend = get_backend()
    unwrapped = backend.plain(value)
    if unwrapped is not value:
        return unwrapped.detach()
    tiles = tiles_of_placements(name, value)
    mesh = value.device_mesh
    if mesh.size() != backend.device_count():
        raise ConfigError(
            f"{name} is placed on a mesh of {mesh.size()} devices, and there are {backend.device_count()}: place it on "
            "a mesh of all devices, or give the model without placements"
        )
    if value.device.type == "meta":
        raise ConfigError(f"{name} is on the meta device: give it values first (model.to_empty and initialise)")
    if not backend.is_spmd():
        raise ConfigError(
            f"{name} is a DTensor, and the runtime drives one device: call xla_adapters.initialize(spmd=True) first"
        )
    whole = _whole(name, value)
    return backend.to_device(whole) if tiles.number == 1 else backend.upload_sharded(whole, tiles)


def _whole(name: str, value: DTensor) -> torch.Tensor:
    local = value.to_local().detach()
    if local.shape == value.shape:
        return local
    groups = [value.device_mesh.get_group(axis) for axis in range(value.device_mesh.ndim)]
    if any(dist.get_backend(group) == "fake" for group in groups):
        raise ConfigError(f"{name}: most of its values are on ranks that a fake process group only pretends there are")
    return value.full_tensor().detach()


def tiles_of_placements(name: str, value: DTensor) -> Tiles:
    """How the compiler sees the placements of a DTensor; ranks of its mesh are numbers of devices.

    Raises:
        ConfigError: it is a partial sum.
    """
    mesh, spec = mesh_and_spec(name, value)
    tiles = tiles_of(mesh, spec)
    ranks = value.device_mesh.mesh.flatten().tolist()
    return Tiles(counts=tiles.counts, devices=tuple(ranks[device] for device in tiles.devices))


def mesh_and_spec(name: str, value: DTensor) -> tuple[Mesh, Spec]:
    """The mesh and the placements of a DTensor in our terms.

    Args:
        name: of it, for messages.
        value: any.

    Raises:
        ConfigError: it is a partial sum.
    """
    shape = tuple(value.device_mesh.shape)
    axes = value.device_mesh.mesh_dim_names or tuple(f"axis{index}" for index in range(len(shape)))
    dims: list[list[str]] = [[] for _ in range(value.ndim)]
    # FSDP writes a dimension that tensor parallelism has cut before as strided: its axis is the inner one.
    for strided in (False, True):
        for axis, placement in zip(axes, value.placements, strict=True):
            if placement.is_partial():
                raise ConfigError(f"{name} is a partial sum over {axis!r}: call redistribute on it first")
            if isinstance(placement, Shard) and isinstance(placement, _StridedShard) == strided:
                dims[placement.dim].append(axis)
    spec: list[DimSpec] = [None if not dim else dim[0] if len(dim) == 1 else tuple(dim) for dim in dims]
    return Mesh(shape=shape, axis_names=tuple(axes)), tuple(spec)
