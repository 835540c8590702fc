"""`distribute_module`: shards a model over all devices with one call, like torch's function of this name.

`accept_placements` converts models whose parameters are DTensors (torch's, or torch_xla's wrappers) to plain sharded
tensors. Source: RFC pytorch/xla#6322, whose `partition_fn="AUTO"` does not exist in torch_xla 2.9.
"""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Callable
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import _pytree

from xla_adapters.errors import ConfigError, UnsupportedOptionError
from xla_adapters.runtime import Runtime, TileAssignment, get_runtime
from xla_adapters.runtime.transfers import uploading
from xla_adapters.sharding.config import Scheme, ShardingConfig
from xla_adapters.sharding.data_parallel import DataParallel, check_scheme
from xla_adapters.sharding.mesh import DATA, DimSpec, Mesh, Spec, tiles_of
from xla_adapters.sharding.placement import Placement
from xla_adapters.sharding.plan import ShardingPlan
from xla_adapters.sharding.sharder import annotated, make_plan, possible_meshes
from xla_adapters.sharding.templates import default_mesh, template


def accept_placements(model: torch.nn.Module) -> list[str]:
    """Replaces DTensors of a model by plain tensors on the devices, sharded as they were placed.

    A plan made afterwards keeps their sharding (`keep_user_sharding`); replicated ones may be sharded by the plan.
    Works in place. Create the optimizer afterwards: an older one holds the parameters from before.

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


AUTO = "AUTO"
PartitionFn = Callable[[str, torch.nn.Module, DeviceMesh], None]

_placements: weakref.WeakKeyDictionary[torch.nn.Module, Placement] = weakref.WeakKeyDictionary()
# Those that ranks train together.
_over: weakref.WeakKeyDictionary[torch.nn.Module, DataParallel] = weakref.WeakKeyDictionary()


def distribute_module(
    module: torch.nn.Module,
    device_mesh: Mesh | DeviceMesh | None = None,
    partition_fn: str | ShardingConfig | PartitionFn | None = AUTO,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
    *,
    example: Any = None,
) -> torch.nn.Module:
    """Shards a model over all devices.

    Call it before you create the optimizer, and run each training step in `xla_adapters.step()`. The arguments of the
    model's calls are split over the data axis; use `place_batch` for tensors that the model does not get (labels).

        model = distribute_module(Net(), partition_fn="AUTO", example=batch)

    Args:
        module: on the host, or already annotated on the device; changed in place.
        device_mesh: chosen if not given. Its axes must be named `"data"` (the batch) and `"model"` (layers).
        partition_fn: `"AUTO"` takes the cheapest plan; `"dp"`, `"fsdp"`, `"tp"` and `"2d"` are templates; a
            `ShardingConfig` can be either. Ranks of TorchTPU have `"dp"` and `"fsdp"` only. Parameters that are
            DTensors or annotated keep their sharding. A function is called as torch calls it, with each module's
            name, the module and the mesh; it shards the module's parameters with `distribute_tensor` or
            `xs.mark_sharding`, and all others are replicated. None replicates everything.
        input_fn: called with (module, inputs, mesh) before each forward, instead of the splitting; returns the inputs,
            or None if it annotated them in place.
        output_fn: called with (module, outputs, mesh) after each forward; returns the outputs, or None.
        example: a batch as the model will be called (a tensor, a dict, a tuple); `"AUTO"` plans for it.

    Returns:
        The module; `plan_of(module)` is its plan.

    Raises:
        ConfigError: an argument is not valid, the mesh is for another number of devices, no plan fits the memory, or
            the module was distributed before.
        RuntimeOrderError: the runtime was started without SPMD before.
    """
    if module in _placements or module in _over:
        raise ConfigError("distribute_module was called on this module before; call it once")
    for name, function in (("input_fn", input_fn), ("output_fn", output_fn)):
        if function is not None and len(inspect.signature(function).parameters) != 3:
            raise ConfigError(f"{name} is called with three arguments: the module, the values and the mesh")
    runtime = get_runtime()
    runtime.device.initialize(spmd=True)
    mesh = _own_mesh(device_mesh, runtime.device.count())
    if runtime.device.ranks is not None or not runtime.has_spmd:
        return _over_ranks(module, partition_fn, mesh, input_fn or output_fn)
    if partition_fn is None or callable(partition_fn):
        placement = Placement(_partitioned(module, mesh, device_mesh, partition_fn, runtime), runtime)
    else:
        accept_placements(module)
        config = _config(partition_fn, mesh)
        devices = runtime.device.count()
        cut_for, fixed = annotated(module, possible_meshes(config, devices), runtime)
        plan = make_plan(module, config, devices, mesh=cut_for, fixed=fixed, example=lambda: _arguments(example))
        placement = Placement(plan, runtime)
    placement.move_model(module)
    _placements[module] = placement
    _hook(module, placement, runtime, device_mesh or placement.plan.mesh, input_fn, output_fn)
    return module


def _over_ranks(module: torch.nn.Module, partition_fn: object, mesh: Mesh | None, function: object) -> torch.nn.Module:
    """Has ranks train a module together, each with the whole of it and its own part of each batch."""
    if partition_fn is None or callable(partition_fn) or function is not None or mesh is not None:
        raise UnsupportedOptionError(
            "several processes with one device each: give distribute_module the module and partition_fn='dp' or "
            "'fsdp', and each rank its own part of the batch"
        )
    config = _config(partition_fn, mesh)  # type: ignore[arg-type]
    check_scheme(config)
    _over[module] = ranks = DataParallel.of_process()
    if get_runtime().device.ranks is None:
        return module.to(get_runtime().device.torch_device())
    ranks.prepare(module, config)
    module.to(get_runtime().device.torch_device())
    ranks.prepare(module)
    return module


def plan_of(module: torch.nn.Module) -> ShardingPlan:
    """The plan of a model that `distribute_module` returned.

    Raises:
        ConfigError: the model is not distributed.
    """
    return _placement_of(module).plan


def place_batch(module: torch.nn.Module, batch: Any) -> Any:
    """Moves a batch to the devices, sharded as the inputs of a distributed model.

    Args:
        module: the result of `distribute_module`.
        batch: nested mappings, lists and tuples of tensors, on the host or the device.

    Raises:
        ConfigError: the module is not distributed.
    """
    if module in _over:
        # A rank is given its own part.
        with uploading():
            device = get_runtime().device.torch_device()
            return _pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)
    placement, device = _placement_of(module), get_runtime().device.torch_device()
    # In eager mode a tensor would be uploaded whole before its shards are.
    with uploading():
        return placement.place_batch(_pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch))


def _placement_of(module: torch.nn.Module) -> Placement:
    if module not in _placements:
        raise ConfigError("this module is not distributed: call distribute_module on it")
    return _placements[module]


def _own_mesh(given: Mesh | DeviceMesh | None, devices: int) -> Mesh | None:
    if given is None or isinstance(given, Mesh):
        mesh = given
    elif isinstance(given, DeviceMesh):
        if given.mesh.flatten().tolist() != list(range(given.size())):
            raise ConfigError(
                f"device_mesh has its devices in the order {given.mesh.tolist()}; give them in rising order"
            )
        if given.mesh_dim_names is None:
            raise ConfigError("device_mesh has no names for its axes: give mesh_dim_names=('data', 'model')")
        mesh = Mesh(shape=tuple(given.shape), axis_names=given.mesh_dim_names)
    else:
        raise ConfigError(f"device_mesh={given!r} is not a valid value; valid values: None, a Mesh, a DeviceMesh")
    if mesh is not None and mesh.size != devices:
        raise ConfigError(f"device_mesh ({mesh}) is for {mesh.size} devices, and there are {devices}")
    return mesh


def _config(partition_fn: str | ShardingConfig, mesh: Mesh | None) -> ShardingConfig:
    if isinstance(partition_fn, ShardingConfig):
        config = partition_fn
        if mesh is not None and config.mesh_shape is not None:
            raise ConfigError("the mesh is given twice: as device_mesh and in the ShardingConfig")
        if config.checkpoints != "whole":
            raise ConfigError(
                f"checkpoints={config.checkpoints!r} is an option of trainers; save a distributed module with "
                "xla_adapters.sharding.state.save_state, which writes parts"
            )
    elif isinstance(partition_fn, str) and partition_fn.lower() in get_args(Scheme):
        config = ShardingConfig(scheme=partition_fn.lower())  # type: ignore[arg-type]
    else:
        valid = ", ".join(map(repr, (AUTO, *get_args(Scheme)[1:])))
        raise ConfigError(
            f"partition_fn={partition_fn!r} is not a valid value; valid values: {valid}, a ShardingConfig, a function, "
            "None"
        )
    if mesh is None:
        return config
    return dataclasses.replace(config, mesh_shape=mesh.shape, axis_names=mesh.axis_names)


def _partitioned(
    module: torch.nn.Module,
    mesh: Mesh | None,
    given: Mesh | DeviceMesh | None,
    partition_fn: PartitionFn | None,
    runtime: Runtime,
) -> ShardingPlan:
    """Calls a `partition_fn` on each submodule; parameters that it leaves alone are replicated."""
    mesh = mesh if mesh is not None else default_mesh("dp", runtime.device.count())
    if partition_fn is not None:
        ranks = torch.arange(mesh.size).reshape(mesh.shape)
        torch_mesh = (
            given if isinstance(given, DeviceMesh) else DeviceMesh("xla", ranks, mesh_dim_names=mesh.axis_names)
        )
        for name, part in module.named_modules():
            partition_fn(name, part, torch_mesh)
    accept_placements(module)
    _, fixed = annotated(module, [mesh], runtime)
    scheme = "dp" if DATA in mesh.axis_names else "tp"
    plan = template(scheme, module, mesh, config=ShardingConfig(scheme=scheme), fixed=fixed)  # type: ignore[arg-type]
    return dataclasses.replace(plan, name="partition_fn")


def _arguments(example: Any) -> Any:
    return (example,) if isinstance(example, torch.Tensor) else example


def _hook(
    module: torch.nn.Module,
    placement: Placement,
    runtime: Runtime,
    mesh: Mesh | DeviceMesh,
    input_fn: Callable[..., Any] | None,
    output_fn: Callable[..., Any] | None,
) -> None:
    def plain(values: Any) -> Any:
        return _pytree.tree_map(
            lambda value: runtime.spmd.plain(value) if isinstance(value, torch.Tensor) else value, values
        )

    def split(_: torch.nn.Module, args: Any, kwargs: Any) -> None:
        placement.place_batch((args, kwargs))

    def inputs(_: torch.nn.Module, args: Any) -> Any:
        assert input_fn is not None
        return plain(input_fn(module, args, mesh))

    def outputs(_: torch.nn.Module, args: Any, values: Any) -> Any:
        assert output_fn is not None
        return plain(output_fn(module, values, mesh))

    if input_fn is None:
        module.register_forward_pre_hook(split, with_kwargs=True)
    else:
        module.register_forward_pre_hook(inputs)
    placement.constrain_always(module)
    if output_fn is not None:
        module.register_forward_hook(outputs)
