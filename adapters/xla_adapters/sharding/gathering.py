"""`gather_where_used`: parameters that are stored in parts over the data axis are put together where they are used.

Left to itself the compiler may as well move the activations to the parts (GSPMD, arXiv 2105.04663, propagates from both
sides): on GPT-2 that sends up to twice as much. Its gradient is brought to the parts at once (ZeRO, arXiv 1910.02054).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from xla_adapters.backend import Backend, Tiles
from xla_adapters.sharding.mesh import DATA, Mesh, Spec, axes_of
from xla_adapters.sharding.plan import ShardingPlan
from xla_adapters.sharding.tiling import tiles_of
from xla_adapters.step_scope import in_step


def used_spec(spec: Spec) -> Spec:
    """How an operator gets a parameter that is stored so: whole on the data axis."""
    used: list[Any] = []
    for dim in spec:
        axes = tuple(axis for axis in axes_of(dim) if axis != DATA)
        used.append(None if not axes else axes[0] if len(axes) == 1 else axes)
    return tuple(used)


def gather_where_used(model: torch.nn.Module, plan: ShardingPlan, backend: Backend) -> list[RemovableHandle]:
    """Lets modules find their parameters put together in compiled steps, until the hooks are removed."""
    handles: list[RemovableHandle] = []
    for prefix, module in model.named_modules():
        found: dict[str, tuple[Tiles, Tiles]] = {}
        for name, _ in module.named_parameters(prefix, recurse=False):
            spec = plan.spec_of(name)
            if parts_over_data(plan.mesh, spec):
                found[name.rpartition(".")[2]] = (tiles_of(plan.mesh, used_spec(spec)), tiles_of(plan.mesh, spec))
        if found:
            gatherer = _Gatherer(backend, found)
            handles.append(module.register_forward_pre_hook(gatherer.before))
            handles.append(module.register_forward_hook(gatherer.after, always_call=True, prepend=True))
    return handles


def parts_over_data(mesh: Mesh, spec: Spec) -> bool:
    """Whether devices along the data axis hold different parts."""
    return used_spec(spec) != spec and mesh.axis_size(DATA) > 1


class _Gatherer:
    """The hooks of one module."""

    def __init__(self, backend: Backend, tiles: dict[str, tuple[Tiles, Tiles]]) -> None:
        self._backend = backend
        self._tiles = tiles
        self._stored: list[dict[str, torch.nn.Parameter | None]] = []

    def before(self, module: torch.nn.Module, args: Any) -> None:
        if not in_step():
            return
        own: dict[str, Any] = module._parameters
        self._stored.append(dict(own))
        for name, (used, stored) in self._tiles.items():
            value = own[name]
            if isinstance(value, torch.nn.Parameter) and self._backend.is_backend_tensor(value):
                own[name] = self._backend.constrain(value, used, gradient=stored)

    def after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._stored:
            module._parameters.update(self._stored.pop())

    # Known to `replay`: they do nothing beside tensors.
    before.only_tensors = after.only_tensors = True  # type: ignore[attr-defined]
