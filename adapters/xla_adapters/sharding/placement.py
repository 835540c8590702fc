"""`Placement`: applies a plan to a model, its batches and its activations.

Parameters that are split over the data axis are gathered before their module uses them (FSDP), and those for which the
plan has `used` over the model axis, too. Without this, GSPMD (arXiv 2105.04663) may move the activations to the shards
instead: up to twice the communication volume in a GPT-2. The gradient is reduce-scattered to the shards (ZeRO, arXiv
1910.02054).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from xla_adapters.errors import ConfigError
from xla_adapters.open_step import in_step
from xla_adapters.runtime import Runtime, TileAssignment, get_runtime
from xla_adapters.sharding.mesh import MODEL, tiles_of, without
from xla_adapters.sharding.plan import ShardingPlan
from xla_adapters.sharding.plan_data import ActivationPlan
from xla_adapters.tracing.step_scope import when_step_ends


def gather_where_used(model: torch.nn.Module, plan: ShardingPlan, runtime: Runtime) -> list[RemovableHandle]:
    """Registers hooks that gather the parameters of modules in compiled steps; returns the handles of the hooks."""
    handles: list[RemovableHandle] = []
    for prefix, module in model.named_modules():
        found: dict[str, _Tiles] = {}
        for name, _ in module.named_parameters(prefix, recurse=False):
            entry = plan.parameter(name)
            used, stored = tiles_of(plan.mesh, entry.spec_in_use), tiles_of(plan.mesh, entry.spec)
            if used != stored:
                summed = stored if entry.used is None else tiles_of(plan.mesh, without(entry.spec, MODEL))
                found[name.rpartition(".")[2]] = _Tiles(used=used, summed=summed, stored=stored)
        if found:
            gatherer = _Gatherer(runtime, found)
            handles.append(module.register_forward_pre_hook(gatherer.before))
            handles.append(module.register_forward_hook(gatherer.after, prepend=True))
    return handles


@dataclass(frozen=True, kw_only=True)
class _Tiles:
    """The tile assignments of one parameter.

    Attributes:
        used: during the forward.
        summed: of its gradient as the backward computes it. If that were split over the model axis, the compiler would
            split the activations that it is computed from, and all values that depend on them.
        stored: between steps, and of its final gradient.
    """

    used: TileAssignment
    summed: TileAssignment
    stored: TileAssignment


class _Gatherer:
    """The hooks of one module: before its forward they replace its parameters by gathered ones, after it back.

    Args:
        runtime: the runtime.
        tiles: tile assignments by name of the parameter in the module.
    """

    def __init__(self, runtime: Runtime, tiles: dict[str, _Tiles]) -> None:
        self._runtime = runtime
        self._tiles = tiles
        # During the module's forward: its stored parameters.
        self._stored: dict[str, torch.nn.Parameter | None] = {}

    def before(self, module: torch.nn.Module, args: Any) -> None:
        if not in_step():
            return
        # After an error in the last forward the gathered parameters are still there: while
        # `torch.compiler.is_compiling()` is True, as in a step, torch calls no hooks then, not even with `always_call`.
        self._put_back(module)
        when_step_ends(functools.partial(self._put_back, module))
        own: dict[str, Any] = module._parameters
        self._stored = dict(own)
        for name, tiles in self._tiles.items():
            value = own[name]
            if isinstance(value, torch.nn.Parameter) and self._runtime.device.owns(value):
                if tiles.summed != tiles.stored:
                    value = self._runtime.spmd.constrain(value, tiles.stored)
                own[name] = self._runtime.spmd.constrain(value, tiles.used, gradient=tiles.summed)

    def after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._put_back(module)

    def _put_back(self, module: torch.nn.Module) -> None:
        module._parameters.update(self._stored)
        self._stored = {}

    # Tells `replay` that the hooks have no effect besides tensor operations, so they need not run in a replay.
    before.only_tensors = after.only_tensors = True  # type: ignore[attr-defined]


class Placement:
    """Applies a plan: shards parameters and batches, and constrains activations.

    Args:
        plan: made for the model.
        runtime: the runtime, under SPMD.
    """

    def __init__(self, plan: ShardingPlan, runtime: Runtime | None = None) -> None:
        self.plan = plan
        self._runtime = runtime if runtime is not None else get_runtime()
        self._batch_parts = math.prod(plan.mesh.axis_size(axis) for axis in plan.batch)

    def move_model(self, model: torch.nn.Module) -> None:
        """Moves parameters and buffers from the host to the devices, in place; tied weights stay tied.

        Parameters are uploaded as shards, so no device ever holds a whole sharded parameter.

        Raises:
            ConfigError: the plan was made for another model.
        """
        runtime = self._runtime
        moved: dict[int, torch.Tensor] = {}
        for prefix, module in model.named_modules():
            for key, value in module._parameters.items():
                if value is None or runtime.device.owns(value):
                    continue
                if id(value) not in moved:
                    tiles = tiles_of(self.plan.mesh, self.plan.spec_of(f"{prefix}.{key}" if prefix else key))
                    copy = runtime.spmd.upload_sharded(value, tiles)
                    moved[id(value)] = torch.nn.Parameter(copy, requires_grad=value.requires_grad)
                module._parameters[key] = moved[id(value)]
            for key, buffer in module._buffers.items():
                if buffer is not None and not runtime.device.owns(buffer):
                    if id(buffer) not in moved:
                        moved[id(buffer)] = runtime.transfers.to_device(buffer)
                    module._buffers[key] = moved[id(buffer)]
        self.place_model(model)

    def place_model(self, model: torch.nn.Module) -> None:
        """Shards the parameters on the device; call it again after other code may have replaced their values.

        Raises:
            ConfigError: the plan was made for another model.
        """
        if self._runtime.tracing.pending_count():
            # A pending tensor would be annotated in its graph only, and its result may get another sharding.
            self._runtime.tracing.flush()
        for name, parameter in model.named_parameters():
            self._place(name, parameter)

    def _place(self, name: str, parameter: torch.Tensor) -> None:
        spec = self.plan.spec_of(name)
        if len(spec) != parameter.ndim:
            raise ConfigError(
                f"the plan {self.plan.name!r} has {len(spec)} dimensions for {name}, the model {parameter.ndim}: "
                "it was made for another model"
            )
        self._runtime.spmd.shard(parameter, tiles_of(self.plan.mesh, spec))

    def place_batch(self, batch: Any) -> Any:
        """Shards each tensor of a batch along its first dimension, in place, and returns the batch.

        A tensor whose first dimension does not divide (the last batch of an epoch, a scalar) is replicated. The result
        is the same, but every device does all of the work.

        Args:
            batch: nested mappings, lists and tuples of tensors on the device.
        """
        if isinstance(batch, torch.Tensor):
            if self._runtime.device.owns(batch) and self.is_split(batch):
                first = self.plan.batch[0] if len(self.plan.batch) == 1 else self.plan.batch
                self._runtime.spmd.shard(batch, tiles_of(self.plan.mesh, (first, *[None] * (batch.ndim - 1))))
        elif isinstance(batch, Mapping):
            for value in batch.values():
                self.place_batch(value)
        elif isinstance(batch, (list, tuple)):
            for value in batch:
                self.place_batch(value)
        return batch

    def is_split(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the batch is split over the devices."""
        return tensor.ndim > 0 and self._batch_parts > 1 and tensor.shape[0] % self._batch_parts == 0

    @contextmanager
    def resharding_loaded_state(self, model: torch.nn.Module) -> Iterator[None]:
        """Inside the context, parameters are sharded again after `load_state_dict` of the model or of a submodule."""

        def loaded(prefix: str, module: torch.nn.Module, _: Any) -> None:
            for name, parameter in module.named_parameters(prefix, recurse=False):
                if not self._runtime.tracing.is_pending(parameter):
                    self._place(name, parameter)

        with ExitStack() as stack:
            for prefix, module in model.named_modules():
                hook = functools.partial(loaded, prefix)
                stack.callback(module.register_load_state_dict_post_hook(hook).remove)
            yield

    @contextmanager
    def constraining(self, model: torch.nn.Module) -> Iterator[None]:
        """Inside the context, activations in compiled steps are constrained as planned.

        Raises:
            ConfigError: the plan names a module the model does not have.
        """
        with ExitStack() as stack:
            for handle in self.constrain_always(model):
                stack.callback(handle.remove)
            yield

    def constrain_always(self, model: torch.nn.Module) -> list[RemovableHandle]:
        """As `constraining`, until the returned hooks are removed.

        Raises:
            ConfigError: the plan names a module the model does not have.
        """
        modules = dict(model.named_modules())
        for entry in self.plan.activations:
            if entry.module not in modules:
                raise ConfigError(
                    f"the plan {self.plan.name!r} constrains the {entry.of} of {entry.module!r}, and the model has no "
                    "such module: it was made for another model"
                )
        handles = gather_where_used(model, self.plan, self._runtime)
        for entry in self.plan.activations:
            module, constrain = modules[entry.module], self._constraint(entry)
            if entry.of == "output":
                handles.append(module.register_forward_hook(_on_output(constrain)))
            else:
                handles.append(module.register_forward_pre_hook(_on_input(constrain), with_kwargs=True))
        return handles

    def _constraint(self, entry: ActivationPlan) -> Callable[[Any], Any]:
        tiles = tiles_of(self.plan.mesh, entry.spec)
        gradient = tiles if entry.gradient is None else tiles_of(self.plan.mesh, entry.gradient)

        def constrain(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.ndim != len(entry.spec) or not value.is_floating_point():
                return value
            for asked in (tiles, gradient):
                if any(size % count for size, count in zip(value.shape, asked.counts, strict=True)):
                    return value
            return self._runtime.spmd.constrain(value, tiles, gradient=gradient)

        return constrain


def _on_output(constrain: Callable[[Any], Any]) -> Callable[..., Any]:
    """A forward hook that constrains the output of a module (of a tuple, the first element)."""

    def hook(module: torch.nn.Module, args: Any, output: Any) -> Any:
        if not in_step():
            return output
        if isinstance(output, tuple) and not hasattr(output, "_fields"):
            return (constrain(output[0]), *output[1:]) if output else output
        return constrain(output)

    # Tells `replay` that the hook has no effect besides tensor operations, so it need not run in a replay.
    hook.only_tensors = True  # type: ignore[attr-defined]
    return hook


def _on_input(constrain: Callable[[Any], Any]) -> Callable[..., Any]:
    """A forward pre-hook that constrains the first argument of a module, positional or by name."""

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not in_step():
            return None
        if args:
            return (constrain(args[0]), *args[1:]), kwargs
        return args, {name: value if at else constrain(value) for at, (name, value) in enumerate(kwargs.items())}

    hook.only_tensors = True  # type: ignore[attr-defined]
    return hook
