"""`plan_model`, `evaluate` and `evaluate_all`: the planner's functions to call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from xla_adapters.sharding.config import ShardingConfig
from xla_adapters.sharding.mesh import Mesh, Spec, factorizations
from xla_adapters.sharding.plan import ShardingPlan
from xla_adapters.sharding.plan_data import PlanCost
from xla_adapters.sharding.planner.planner import Batch, Planner
from xla_adapters.sharding.planner.topology import Topology


def plan_model(
    model: nn.Module,
    batch: Batch,
    *,
    mesh: Mesh | None,
    devices: int,
    config: ShardingConfig,
    topology: Topology,
    optimizer_bytes_per_parameter: float | None = None,
    fixed: Mapping[str, Spec] | None = None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[ShardingPlan]:
    """Plans how to split a training step over devices, after Alpa (Zheng et al., OSDI 2022).

    The forward is captured without weights. Each operator has a set of possible layouts on a (data, model) mesh, and
    each parameter a set of ways to be stored. An integer linear program chooses among them for the fastest step within
    the memory budget.

    Args:
        model: on any device, also meta; it is not changed.
        batch: the global batch: keyword arguments of `forward`, or positional ones; only shapes and dtypes matter.
        mesh: to plan for; None tries all `factorizations(devices, 2)`.
        devices: number of devices.
        config: only `memory_budget` (bytes per device) and `overrides` are used here.
        topology: of devices and links.
        optimizer_bytes_per_parameter: bytes per element of a trainable parameter; None for Adam's two
            averages, in the dtype of the parameter.
        fixed: specs of parameters that are already annotated; they are kept.
        around: returns the context that forward passes run in.

    Returns:
        Plans with their predicted cost, the fastest first; up to two for each mesh: one whose activations GSPMD
        propagates from the parameters, and, if it differs, one that needs its constraints on `activations`.

    Raises:
        ConfigError: nothing fits the memory budget, or the batch or a given spec fits no mesh.
    """
    planner = Planner.begin(
        model,
        batch,
        topology=topology,
        optimizer_bytes=optimizer_bytes_per_parameter,
        fixed=fixed,
        overrides=config.overrides,
        around=around,
    )
    return planner.best(meshes_of(mesh, devices), config.memory_budget, given=mesh is not None)


def meshes_of(mesh: Mesh | None, devices: int) -> list[Mesh]:
    """The given mesh, or all (data, model) meshes of so many devices."""
    return [mesh] if mesh is not None else [Mesh.data_and_model(*shape) for shape in factorizations(devices, 2)]


def evaluate(
    plan: ShardingPlan,
    model: nn.Module,
    batch: Batch,
    *,
    topology: Topology,
    optimizer_bytes_per_parameter: float | None = None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> PlanCost:
    """The predicted cost of a step under a given plan.

    Activations have the layouts of the plan's constraints or, without any, those that GSPMD (Xu et al., arXiv
    2105.04663) propagates. What the plan leaves open is chosen for the fastest step.

    Args:
        plan: for this model.
        model, batch, topology, optimizer_bytes_per_parameter, around: as in `plan_model`.

    Raises:
        ConfigError: the plan is for another model, or its mesh does not divide the batch.
    """
    (cost,) = evaluate_all(
        [plan],
        model,
        batch,
        topology=topology,
        optimizer_bytes_per_parameter=optimizer_bytes_per_parameter,
        around=around,
    )
    return cost


def evaluate_all(
    plans: Sequence[ShardingPlan],
    model: nn.Module,
    batch: Batch,
    *,
    topology: Topology,
    optimizer_bytes_per_parameter: float | None = None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[PlanCost]:
    """The predicted cost of a step under each of several plans; the model is captured once.

    Args:
        plans: for this model.
        model, batch, topology, optimizer_bytes_per_parameter, around: as in `plan_model`.

    Raises:
        ConfigError: as in `evaluate`.
    """
    planner = Planner.begin(
        model, batch, topology=topology, optimizer_bytes=optimizer_bytes_per_parameter, around=around
    )
    return planner.costs(plans)
