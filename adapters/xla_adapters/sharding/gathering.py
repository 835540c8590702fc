"""`gather_where_used`: parameters that are stored in parts over the data axis are put together where they are used.

So are those which the plan wants whole on the model axis too.

Left to itself the compiler may as well move the activations to the parts (GSPMD, arXiv 2105.04663, propagates from both
sides): on GPT-2 that sends up to twice as much. Its gradient is brought to the parts at once (ZeRO, arXiv 1910.02054).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from xla_adapters.backend import Backend, Tiles
from xla_adapters.sharding.mesh import MODEL, without
from xla_adapters.sharding.plan import ShardingPlan
from xla_adapters.sharding.tiling import tiles_of
from xla_adapters.step_scope import in_step


def gather_where_used(model: torch.nn.Module, plan: ShardingPlan, backend: Backend) -> list[RemovableHandle]:
    """Lets modules find their parameters put together in compiled steps, until the hooks are removed."""
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
            gatherer = _Gatherer(backend, found)
            handles.append(module.register_forward_pre_hook(gatherer.before))
            handles.append(module.register_forward_hook(gatherer.after, always_call=True, prepend=True))
    return handles


@dataclass(frozen=True, kw_only=True)
class _Tiles:
    """Of one parameter.

    Attributes:
        used: as the module gets it.
        summed: its gradient, as the module makes it. Cut over the model axis at once, it would make the compiler cut
            the activations it is made of, and so all that is made of those.
        stored: as it lies, and its gradient in the end.
    """

    used: Tiles
    summed: Tiles
    stored: Tiles


class _Gatherer:
    """The hooks of one module."""

    def __init__(self, backend: Backend, tiles: dict[str, _Tiles]) -> None:
        self._backend = backend
        self._tiles = tiles
        self._stored: list[dict[str, torch.nn.Parameter | None]] = []

    def before(self, module: torch.nn.Module, args: Any) -> None:
        if not in_step():
            return
        own: dict[str, Any] = module._parameters
        self._stored.append(dict(own))
        for name, tiles in self._tiles.items():
            value = own[name]
            if isinstance(value, torch.nn.Parameter) and self._backend.is_backend_tensor(value):
                if tiles.summed != tiles.stored:
                    value = self._backend.constrain(value, tiles.stored)
                own[name] = self._backend.constrain(value, tiles.used, gradient=tiles.summed)

    def after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._stored:
            module._parameters.update(self._stored.pop())

    # Known to `replay`: they do nothing beside tensors.
    before.only_tensors = after.only_tensors = True  # type: ignore[attr-defined]
