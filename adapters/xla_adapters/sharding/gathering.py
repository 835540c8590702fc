"""`gather_where_used`: gathers parameters that are split over the data axis before their module uses them (FSDP).

Parameters for which the plan has `used` are gathered over the model axis, too. Without this, GSPMD (arXiv 2105.04663)
may move the activations to the shards instead: up to twice the communication volume in a GPT-2. The gradient is
reduce-scattered to the shards (ZeRO, arXiv 1910.02054).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from xla_adapters.open_step import in_step
from xla_adapters.runtime import Runtime, TileAssignment
from xla_adapters.sharding.mesh import MODEL, without
from xla_adapters.sharding.plan import ShardingPlan
from xla_adapters.sharding.tiling import tiles_of
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
