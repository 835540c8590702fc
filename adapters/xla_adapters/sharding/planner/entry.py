"""`plan_model`, `evaluate` and `evaluate_all`: what the planner is called by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from xla_adapters.sharding.config import ShardingConfig
from xla_adapters.sharding.mesh import Mesh, Spec, factorizations
from xla_adapters.sharding.plan import PlanCost, ShardingPlan
from xla_adapters.sharding.planner.planner import ADAM_BYTES, Batch, Planner
from xla_adapters.sharding.planner.topology import Topology


def plan_model(
    model: nn.Module,
    batch: Batch,
    *,
    mesh: Mesh | None,
    devices: int,
    config: ShardingConfig,
    topology: Topology,
    optimizer_bytes_per_parameter: float = ADAM_BYTES,
    fixed: Mapping[str, Spec] | None = None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[ShardingPlan]:
    """Plans how a training step is split over devices, in the manner of Alpa (Zheng et al., OSDI 2022).

    The forward pass is captured without weights, every operator gets its possible layouts on a (data, model) mesh, and
    an integer linear program chooses among them and among the ways to store each parameter, for the least time of one
    step within the memory budget.

    Args:
        model: on any device, also meta; it is not touched.
        batch: keyword arguments of `forward`, or positional ones, of the global batch; only shapes and types matter.
        mesh: to plan for; None to try all `factorizations(devices, 2)`.
        devices: how many there are.
        config: `memory_budget` (bytes per device) and `overrides` are regarded here.
        topology: what devices and links can do.
        optimizer_bytes_per_parameter: for each element of a trainable parameter; 8 is Adam in float32.
        fixed: specs of parameters that are annotated already; the rest is planned around them.
        around: gives the context that forward passes run in.

    Returns:
        Plans with their predicted cost, the fastest first; up to two for each mesh: one whose activations lie as
        parameters imply, and one that relies on its `activations`, where that is another.

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
    """A mesh that was given, or all there are for so many devices."""
    return [mesh] if mesh is not None else [Mesh.data_and_model(*shape) for shape in factorizations(devices, 2)]


def evaluate(
    plan: ShardingPlan,
    model: nn.Module,
    batch: Batch,
    *,
    topology: Topology,
    optimizer_bytes_per_parameter: float = ADAM_BYTES,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> PlanCost:
    """What a step costs under a plan that somebody else made.

    Parameters are stored as the plan says, activations lie as its constraints say or, without any, as GSPMD (Xu et al.,
    arXiv 2105.04663) would lay them out; what the plan leaves open is chosen for the least time.

    Args:
        plan: of this model.
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
    optimizer_bytes_per_parameter: float = ADAM_BYTES,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[PlanCost]:
    """What a step costs under each of several plans; the model is captured once.

    Args:
        plans: of this model.
        model, batch, topology, optimizer_bytes_per_parameter, around: as in `plan_model`.

    Raises:
        ConfigError: as in `evaluate`.
    """
    planner = Planner.begin(
        model, batch, topology=topology, optimizer_bytes=optimizer_bytes_per_parameter, around=around
    )
    return planner.costs(plans)
