"""Converts models whose parameters are DTensors (torch's, or torch_xla's wrappers) to plain sharded tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from xla_adapters.errors import ConfigError
from xla_adapters.runtime import TileAssignment, get_runtime
from xla_adapters.sharding.mesh import DimSpec, Mesh, Spec
from xla_adapters.sharding.tiling import tiles_of


def accept_placements(model: torch.nn.Module) -> list[str]:
    """Replaces DTensors of a model by plain tensors on the devices, sharded as they were placed.

    A plan made afterwards keeps their sharding (`keep_user_sharding`); replicated ones may be sharded by the plan.
    Works in place. Create the optimizer afterwards: an older one holds the former parameters.

    Args:
        model: its DTensors may be torch's own (on a mesh of as many devices as there are here; gathered by a collective
            if other processes hold parts), or come from `distribute_tensor` on an `"xla"` mesh.

    Returns:
        The names of the parameters and buffers that were DTensors.

    Raises:
        ConfigError: a DTensor has no values, is a partial sum, or is on a mesh of another size.
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
    runtime = get_runtime()
    unwrapped = runtime.spmd.plain(value)
    if unwrapped is not value:
        return unwrapped.detach()
    tiles = tiles_of_placements(name, value)
    mesh = value.device_mesh
    if mesh.size() != runtime.device.count():
        raise ConfigError(
            f"{name} is placed on a mesh of {mesh.size()} devices, and there are {runtime.device.count()}: place it on "
            "a mesh of all devices, or give the model without placements"
        )
    if value.device.type == "meta":
        raise ConfigError(f"{name} is on the meta device: give it values first (model.to_empty and initialise)")
    if not runtime.device.is_spmd():
        raise ConfigError(
            f"{name} is a DTensor, and the runtime drives one device: call xla_adapters.initialize(spmd=True) first"
        )
    whole = _whole(name, value)
    return runtime.transfers.to_device(whole) if tiles.number == 1 else runtime.spmd.upload_sharded(whole, tiles)


def _whole(name: str, value: DTensor) -> torch.Tensor:
    local = value.to_local().detach()
    if local.shape == value.shape:
        return local
    groups = [value.device_mesh.get_group(axis) for axis in range(value.device_mesh.ndim)]
    if any(dist.get_backend(group) == "fake" for group in groups):
        raise ConfigError(f"{name}: most of its values are on ranks that a fake process group only pretends there are")
    return value.full_tensor().detach()


def tiles_of_placements(name: str, value: DTensor) -> TileAssignment:
    """The tile assignment of a DTensor's placements; ranks of its mesh are taken as device numbers.

    Raises:
        ConfigError: it is a partial sum.
    """
    mesh, spec = mesh_and_spec(name, value)
    tiles = tiles_of(mesh, spec)
    ranks = value.device_mesh.mesh.flatten().tolist()
    return TileAssignment(counts=tiles.counts, devices=tuple(ranks[device] for device in tiles.devices))


def mesh_and_spec(name: str, value: DTensor) -> tuple[Mesh, Spec]:
    """The mesh of a DTensor and its placements as a spec.

    Args:
        name: of the tensor, for messages.
        value: the DTensor.

    Raises:
        ConfigError: it is a partial sum.
    """
    shape = tuple(value.device_mesh.shape)
    axes = value.device_mesh.mesh_dim_names or tuple(f"axis{index}" for index in range(len(shape)))
    dims: list[list[str]] = [[] for _ in range(value.ndim)]
    # FSDP marks a dimension that tensor parallelism has already split as strided; its axis is the inner one.
    for strided in (False, True):
        for axis, placement in zip(axes, value.placements, strict=True):
            if placement.is_partial():
                raise ConfigError(f"{name} is a partial sum over {axis!r}: call redistribute on it first")
            if isinstance(placement, Shard) and isinstance(placement, _StridedShard) == strided:
                dims[placement.dim].append(axis)
    spec: list[DimSpec] = [None if not dim else dim[0] if len(dim) == 1 else tuple(dim) for dim in dims]
    return Mesh(shape=shape, axis_names=tuple(axes)), tuple(spec)
