"""`Placement`: a plan applied to a model, its batches and the values between its modules."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from xla_adapters.backend import Backend, get_backend
from xla_adapters.errors import ConfigError
from xla_adapters.sharding.gathering import gather_where_used
from xla_adapters.sharding.plan import ActivationPlan, ShardingPlan
from xla_adapters.sharding.tiling import tiles_of
from xla_adapters.step_scope import in_step


class Placement:
    """Puts a model, its batches and its intermediate values where a plan says.

    Args:
        plan: for this model.
        backend: the seam; runs under SPMD.
    """

    def __init__(self, plan: ShardingPlan, backend: Backend | None = None) -> None:
        self.plan = plan
        self._backend = backend if backend is not None else get_backend()
        self._batch_parts = math.prod(plan.mesh.axis_size(axis) for axis in plan.batch)

    def move_model(self, model: torch.nn.Module) -> None:
        """Brings what is on the host to the devices: each parameter in parts from the start, ties as they were.

        Raises:
            ConfigError: the plan was made for another model.
        """
        backend = self._backend
        moved: dict[int, torch.Tensor] = {}
        for prefix, module in model.named_modules():
            for key, value in module._parameters.items():
                if value is None or backend.is_backend_tensor(value):
                    continue
                if id(value) not in moved:
                    tiles = tiles_of(self.plan.mesh, self.plan.spec_of(f"{prefix}.{key}" if prefix else key))
                    copy = backend.upload_sharded(value, tiles)
                    moved[id(value)] = torch.nn.Parameter(copy, requires_grad=value.requires_grad)
                module._parameters[key] = moved[id(value)]
            for key, buffer in module._buffers.items():
                if buffer is not None and not backend.is_backend_tensor(buffer):
                    if id(buffer) not in moved:
                        moved[id(buffer)] = backend.to_device(buffer)
                    module._buffers[key] = moved[id(buffer)]
        self.place_model(model)

    def place_model(self, model: torch.nn.Module) -> None:
        """Cuts the parameters; call it when they are on the device, and when others may have written to them.

        Raises:
            ConfigError: the plan was made for another model.
        """
        if self._backend.pending_count():
            # What is not computed yet would be annotated in its graph, and lie somewhere else afterwards.
            self._backend.flush()
        for name, parameter in model.named_parameters():
            self._place(name, parameter)

    def _place(self, name: str, parameter: torch.Tensor) -> None:
        spec = self.plan.spec_of(name)
        if len(spec) != parameter.ndim:
            raise ConfigError(
                f"the plan {self.plan.name!r} has {len(spec)} dimensions for {name}, the model {parameter.ndim}: "
                "it was made for another model"
            )
        self._backend.shard(parameter, tiles_of(self.plan.mesh, spec))

    def place_batch(self, batch: Any) -> Any:
        """The batch, nested as it is, with each tensor cut along its first dimension.

        A tensor whose first dimension does not divide (the last batch of an epoch, a scalar) is held whole by
        every device: right, and as much work for each device as for one.

        Args:
            batch: mappings, lists and tuples of tensors on the device.
        """
        if isinstance(batch, torch.Tensor):
            if self._backend.is_backend_tensor(batch) and self.is_split(batch):
                first = self.plan.batch[0] if len(self.plan.batch) == 1 else self.plan.batch
                self._backend.shard(batch, tiles_of(self.plan.mesh, (first, *[None] * (batch.ndim - 1))))
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
    def cutting_what_is_loaded(self, model: torch.nn.Module) -> Iterator[None]:
        """Cuts again what `load_state_dict` of the model, or of a part of it, copies in, until the exit."""

        def loaded(prefix: str, module: torch.nn.Module, _: Any) -> None:
            for name, parameter in module.named_parameters(prefix, recurse=False):
                if not self._backend.is_pending(parameter):
                    self._place(name, parameter)

        with ExitStack() as stack:
            for prefix, module in model.named_modules():
                hook = functools.partial(loaded, prefix)
                stack.callback(module.register_load_state_dict_post_hook(hook).remove)
            yield

    @contextmanager
    def constraining(self, model: torch.nn.Module) -> Iterator[None]:
        """Holds what modules return in compiled steps to the plan, until the exit.

        Raises:
            ConfigError: the plan names a module the model does not have.
        """
        with ExitStack() as stack:
            for handle in self.constrain_always(model):
                stack.callback(handle.remove)
            yield

    def constrain_always(self, model: torch.nn.Module) -> list[RemovableHandle]:
        """The same without an exit; the hooks it sets can be removed.

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
        handles = gather_where_used(model, self.plan, self._backend)
        for entry in self.plan.activations:
            module, constrain = modules[entry.module], self._constraint(entry)
            if entry.of == "output":
                handles.append(module.register_forward_hook(_on_output(constrain)))
            else:
                handles.append(module.register_forward_pre_hook(_on_input(constrain), with_kwargs=True))
        return handles

    def _constraint(self, entry: ActivationPlan) -> Callable[[Any], Any]:
        tiles = tiles_of(self.plan.mesh, entry.spec)

        def constrain(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.ndim != len(entry.spec) or not value.is_floating_point():
                return value
            if any(size % count for size, count in zip(value.shape, tiles.counts, strict=True)):
                return value
            return self._backend.constrain(value, tiles)

        return constrain


def _on_output(constrain: Callable[[Any], Any]) -> Callable[..., Any]:
    """A hook that constrains what a module returns, or the first of it."""

    def hook(module: torch.nn.Module, args: Any, output: Any) -> Any:
        if not in_step():
            return output
        if isinstance(output, tuple) and not hasattr(output, "_fields"):
            return (constrain(output[0]), *output[1:]) if output else output
        return constrain(output)

    # Known to `replay`: it does nothing beside tensors.
    hook.only_tensors = True  # type: ignore[attr-defined]
    return hook


def _on_input(constrain: Callable[[Any], Any]) -> Callable[..., Any]:
    """A hook that constrains the first thing that a module takes, by position or by name."""

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not in_step():
            return None
        if args:
            return (constrain(args[0]), *args[1:]), kwargs
        return args, {name: value if at else constrain(value) for at, (name, value) in enumerate(kwargs.items())}

    hook.only_tensors = True  # type: ignore[attr-defined]
    return hook
