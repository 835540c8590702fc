"""`automatic_plan`: the planner's plans beside the recipes, the cheapest wins."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree

from xla_adapters.backend import get_backend
from xla_adapters.errors import ConfigError
from xla_adapters.sharding.config import ShardingConfig
from xla_adapters.sharding.mesh import Mesh, Spec
from xla_adapters.sharding.plan import ShardingPlan
from xla_adapters.sharding.planner import ADAM_BYTES, evaluate_all, plan_model
from xla_adapters.sharding.planner.topology import Topology
from xla_adapters.sharding.templates import default_mesh, template

_USABLE = 0.9


def automatic_plan(
    model: torch.nn.Module,
    config: ShardingConfig,
    devices: int,
    *,
    mesh: Mesh | None,
    fixed: dict[str, Spec],
    example: Callable[[], Any] | None,
) -> ShardingPlan:
    """The plan that is predicted to cost least: of the planner's and the recipes that fit the memory.

    Args:
        model: on any device.
        config: the options.
        devices: how many there are.
        mesh: to use; None to choose.
        fixed: specs of parameters that stay as they are.
        example: returns a batch; None or a result of None is a dataset that cannot be looked into.

    Raises:
        ConfigError: nothing fits the memory budget.
    """
    batch = example() if example is not None else None
    if batch is None:
        return _without_batch(model, config, mesh or default_mesh("fsdp", devices), fixed)
    topology, notes = _topology(config)
    if config.memory_budget is None and topology.name != "cpu":
        # The rest is for the compiler's temporary values and the runtime.
        config = dataclasses.replace(config, memory_budget=int(_USABLE * topology.memory_bytes))
    plans = plan_model(model, batch, mesh=mesh, devices=devices, config=config, topology=topology, fixed=fixed)
    recipes: list[ShardingPlan] = []
    for scheme in ("dp", "fsdp", "tp", "2d"):
        try:
            recipes.append(template(scheme, model, mesh or default_mesh(scheme, devices), config=config, fixed=fixed))
        except ConfigError:
            # The mesh has no axis for it: no candidate.
            continue
    rows = {value.shape[0] for value in _pytree.tree_leaves(batch) if isinstance(value, torch.Tensor) and value.ndim}
    recipes = [recipe for recipe in recipes if all(size % _parts(recipe) == 0 for size in rows)]
    for recipe, predicted in zip(recipes, evaluate_all(recipes, model, batch, topology=topology), strict=True):
        if config.memory_budget is None or predicted.memory_bytes <= config.memory_budget:
            plans.append(dataclasses.replace(recipe, predicted=predicted))
    best = min(plans, key=_cost)
    return dataclasses.replace(best, notes=(*best.notes, *notes))


def _without_batch(model: torch.nn.Module, config: ShardingConfig, mesh: Mesh, fixed: dict[str, Spec]) -> ShardingPlan:
    reason = "the plan is the recipe for fully sharded training: there is no batch to plan for (a stream of data)"
    if config.memory_budget is not None:
        reason += ", so that memory_budget holds for parameters, gradients and optimizer state, not for activations"
    warnings.warn(f"sharding: {reason}; name a scheme, or give a dataset with an index", UserWarning, stacklevel=2)
    plan = template("fsdp", model, mesh, config=config, fixed=fixed)
    state = sum(state_bytes(parameter, mesh.shards(plan.spec_of(name))) for name, parameter in model.named_parameters())
    if config.memory_budget is not None and state > config.memory_budget:
        raise ConfigError(
            f"memory_budget={config.memory_budget} bytes per device is too little: parameters, gradients and optimizer "
            f"state alone take {round(state)} bytes on each of {mesh.size} devices; use more devices or a larger budget"
        )
    return dataclasses.replace(plan, notes=(*plan.notes, reason))


def state_bytes(parameter: torch.Tensor, shards: int) -> float:
    """What a parameter takes on one device: itself and, if it is trained, its gradient and Adam's two averages."""
    trained = parameter.element_size() + ADAM_BYTES if parameter.requires_grad else 0
    return float(parameter.numel() * (parameter.element_size() + trained)) / shards


def _parts(plan: ShardingPlan) -> int:
    return math.prod(plan.mesh.axis_size(axis) for axis in plan.batch)


def _topology(config: ShardingConfig) -> tuple[Topology, tuple[str, ...]]:
    if config.topology is not None:
        return Topology.preset(config.topology), ()
    hardware = get_backend().hardware()
    if hardware == "CPU":
        return Topology.preset("cpu"), ()
    return Topology.preset("v5e"), (
        f"planned for links as of a TPU v5e; name the topology of this {hardware} if it has others",
    )


def _cost(plan: ShardingPlan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_seconds
