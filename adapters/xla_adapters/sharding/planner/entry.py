"""`plan_model`, `evaluate` and `evaluate_all`: what the planner is called by."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from xla_adapters.errors import ConfigError
from xla_adapters.sharding.config import ShardingConfig
from xla_adapters.sharding.mesh import DATA, MODEL, Mesh, Spec, factorizations, used_axes
from xla_adapters.sharding.plan import PlanCost, ShardingPlan
from xla_adapters.sharding.planner import inventory, problem, result, structural
from xla_adapters.sharding.planner.capture import Capture, CaptureError, batch_size, capture
from xla_adapters.sharding.planner.costs import Fabric
from xla_adapters.sharding.planner.fold import Folded, fold
from xla_adapters.sharding.planner.graph import Graph, build
from xla_adapters.sharding.planner.layouts import forced, without_cuts
from xla_adapters.sharding.planner.storage import Parameter
from xla_adapters.sharding.planner.strategies import Rules
from xla_adapters.sharding.planner.topology import Topology

# Two averages in float32, for each element of a parameter.
ADAM_BYTES = 8

Batch = Mapping[str, Any] | Sequence[Any]


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

    Returns:
        Plans with their predicted cost, the fastest first; up to two for each mesh: one whose activations lie as
        parameters imply, and one that relies on its `activations`, where that is another.

    Raises:
        ConfigError: nothing fits the memory budget, or the batch or a given spec fits no mesh.
    """
    work = _Work.begin(model, batch, topology, optimizer_bytes_per_parameter, fixed or {}, config.overrides)
    meshes = [mesh] if mesh is not None else [Mesh.data_and_model(*shape) for shape in factorizations(devices, 2)]
    plans: list[ShardingPlan] = []
    least: list[float] = []
    reasons: list[str] = []
    for candidate in meshes:
        try:
            work.check(candidate)
        except ConfigError as error:
            if mesh is not None:
                raise
            reasons.append(str(error))
            continue
        found = work.plans(candidate, config.memory_budget)
        plans += found
        if not found:
            least.append(work.least_memory(candidate))
    # Devices that all do the same are no use; where a mesh is given, that is the user's wish.
    plans = [plan for plan in plans if mesh is not None or not _idle(plan)] or plans
    if not plans and least:
        raise ConfigError(
            f"memory_budget={config.memory_budget} bytes per device is too little: the smallest that any plan for "
            f"{devices} devices takes is {round(min(least))} bytes; use more devices, a smaller batch, gradient "
            "checkpointing or a larger budget"
        )
    if not plans:
        raise ConfigError(f"no mesh of {devices} devices can be used: {'; '.join(sorted(set(reasons)))}")
    return sorted(plans, key=_order)


def evaluate(
    plan: ShardingPlan,
    model: nn.Module,
    batch: Batch,
    *,
    topology: Topology,
    optimizer_bytes_per_parameter: float = ADAM_BYTES,
) -> PlanCost:
    """What a step costs under a plan that somebody else made.

    Parameters are stored as the plan says, activations lie as its constraints say or, without any, as GSPMD (Xu et al.,
    arXiv 2105.04663) would lay them out; what the plan leaves open is chosen for the least time.

    Args:
        plan: of this model.
        model, batch, topology, optimizer_bytes_per_parameter: as in `plan_model`.

    Raises:
        ConfigError: the plan is for another model, or its mesh does not divide the batch.
    """
    (cost,) = evaluate_all(
        [plan], model, batch, topology=topology, optimizer_bytes_per_parameter=optimizer_bytes_per_parameter
    )
    return cost


def evaluate_all(
    plans: Sequence[ShardingPlan],
    model: nn.Module,
    batch: Batch,
    *,
    topology: Topology,
    optimizer_bytes_per_parameter: float = ADAM_BYTES,
) -> list[PlanCost]:
    """What a step costs under each of several plans; the model is captured once.

    Args:
        plans: of this model.
        model, batch, topology, optimizer_bytes_per_parameter: as in `plan_model`.

    Raises:
        ConfigError: as in `evaluate`.
    """
    names = sorted(name for name, _ in model.named_parameters())
    base = _Work.begin(model, batch, topology, optimizer_bytes_per_parameter, {}, {})
    costs = []
    for plan in plans:
        specs = {name: plan.spec_of(name) for name in names}
        work = base.given(specs)
        if work is None:
            work = _Work.begin(model, batch, topology, optimizer_bytes_per_parameter, specs, {})
        work.check(plan.mesh)
        costs.append(work.cost(plan))
    return costs


def _order(plan: ShardingPlan) -> tuple[float, int, tuple[int, ...]]:
    seconds = plan.predicted.step_seconds if plan.predicted is not None else 0.0
    return (float(f"{seconds:.6g}"), len(plan.activations), tuple(-size for size in plan.mesh.shape))


@dataclass(frozen=True, kw_only=True)
class _Captured:
    capture: Capture
    graph: Graph
    folded: Folded


@dataclass(frozen=True, kw_only=True)
class _Work:
    """A model ready to be planned for any mesh."""

    entries: list[inventory.Entry]
    parameters: Mapping[str, Parameter]
    classes: Mapping[str, str]
    captured: _Captured | None
    rows: int
    batch_bytes: float
    topology: Topology
    optimizer_bytes: float
    notes: tuple[str, ...]

    @classmethod
    def begin(
        cls,
        model: nn.Module,
        batch: Batch,
        topology: Topology,
        optimizer_bytes: float,
        fixed: Mapping[str, Spec],
        overrides: Mapping[str, Spec],
    ) -> _Work:
        entries = inventory.take(model, fixed, overrides)
        given = {entry.name: entry.fixed for entry in entries if entry.fixed is not None}
        notes: tuple[str, ...] = ()
        captured = None
        try:
            captured = _captured(model, batch, given)
        except CaptureError as error:
            note = (
                f"the model could not be captured as a graph ({error}): planned by parameters alone, the batch over "
                "all devices"
            )
            warnings.warn(note, stacklevel=4)
            notes = (note,)
        classes = {
            entry.name: captured.folded.parameters.of(entry.name) if captured is not None else entry.name
            for entry in entries
        }
        leaves = [leaf for leaf in _pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        return cls(
            entries=entries,
            parameters=_parameters(entries, classes),
            classes=classes,
            captured=captured,
            rows=batch_size(batch),
            batch_bytes=float(sum(leaf.numel() * leaf.element_size() for leaf in leaves)),
            topology=topology,
            optimizer_bytes=optimizer_bytes,
            notes=notes,
        )

    def given(self, specs: Mapping[str, Spec]) -> _Work | None:
        """The same model with all specs decided; None if layers that are planned as one have different ones."""
        if any(specs[name] != specs[first] for name, first in self.classes.items()):
            return None
        return replace(
            self,
            entries=[replace(entry, fixed=specs[entry.name], decided_by="user") for entry in self.entries],
            parameters={name: replace(item, fixed=specs[name]) for name, item in self.parameters.items()},
        )

    def check(self, mesh: Mesh) -> None:
        """Raises if the batch or a given spec does not fit a mesh."""
        data = self._fabric(mesh).data
        if self.rows % data:
            raise ConfigError(
                f"a batch of {self.rows} rows cannot be split over data={data}: make it a multiple of {data}, or give "
                "a mesh_shape whose data axis divides it"
            )
        inventory.check(self.entries, mesh)

    def plans(self, mesh: Mesh, budget: int | None) -> list[ShardingPlan]:
        """The best plan that GSPMD follows by itself, and the best of all where that is another."""
        if self.captured is None:
            plan = self._structural(mesh, budget)
            return [plan] if plan is not None else []
        found: list[ShardingPlan] = []
        for follow in (True, False) if self._fabric(mesh).model > 1 else (True,):
            program = self._formulate(mesh, [without_cuts] if follow else [], follow=follow)
            values = program.program.solve(self._available(mesh, budget))
            if values is None:
                continue
            plan = self._plan(mesh, program, values)
            if not any(_same(plan, other) for other in found):
                found.append(plan)
        return found

    def least_memory(self, mesh: Mesh) -> float:
        """Bytes per device of the plan that takes the fewest."""
        if self.captured is not None:
            programs = [self._formulate(mesh, [without_cuts], follow=True), self._formulate(mesh, [], follow=False)]
        else:
            fabric = self._fabric(mesh)
            programs = [
                structural.formulate(self.parameters, fabric, rows=self.rows, optimizer_bytes=self.optimizer_bytes)[0]
            ]
        return min(item.program.least_memory() for item in programs) + sum(self._constant(mesh).values())

    def cost(self, plan: ShardingPlan) -> PlanCost:
        """What a step costs under a plan; its specs are those of the parameters here."""
        if self.captured is None:
            found = self._structural(plan.mesh, None)
            return found.predicted or PlanCost() if found is not None else PlanCost()
        rules = Rules(fabric=self._fabric(plan.mesh))
        axes = {axis for item in plan.activations for axis in used_axes(item.spec)} | set(plan.batch)
        follow = MODEL not in axes
        filters: list[problem.Filter] = [without_cuts] if follow else []
        filters += forced(plan, self.captured.graph, self.captured.folded, self.captured.capture.skeleton, rules)
        program = self._formulate(plan.mesh, filters, follow=follow)
        values = program.program.solve(None)
        return result.cost_of(program.program, values or (), self._constant(plan.mesh))

    def _fabric(self, mesh: Mesh) -> Fabric:
        return Fabric(mesh=mesh, topology=self.topology)

    def _constant(self, mesh: Mesh) -> dict[str, float]:
        return {"batch": self.batch_bytes / self._fabric(mesh).data}

    def _available(self, mesh: Mesh, budget: int | None) -> float | None:
        """What is left for the program; never nothing, which no division could express."""
        return None if budget is None else max(1e-3, budget - sum(self._constant(mesh).values()))

    def _formulate(self, mesh: Mesh, filters: Sequence[problem.Filter], *, follow: bool) -> problem.Problem:
        assert self.captured is not None
        return problem.formulate(
            self.captured.graph,
            self.captured.folded,
            self.parameters,
            Rules(fabric=self._fabric(mesh)),
            optimizer_bytes=self.optimizer_bytes,
            filters=filters,
            follow=follow,
        )

    def _plan(self, mesh: Mesh, program: problem.Problem, values: Sequence[float]) -> ShardingPlan:
        assert self.captured is not None
        solution = result.Solution(
            graph=self.captured.graph,
            folded=self.captured.folded,
            skeleton=self.captured.capture.skeleton,
            rules=Rules(fabric=self._fabric(mesh)),
            problem=program,
            values=values,
        )
        notes = self.notes
        if self.captured.graph.unknown:
            listed = ", ".join(sorted(self.captured.graph.unknown))
            notes = (*notes, f"no strategy is known for {listed}: what they take and give is whole on the model axis")
        specs = solution.specs()
        return ShardingPlan(
            name="planner",
            mesh=mesh,
            parameters=tuple(entry.planned(specs[self.classes[entry.name]]) for entry in self.entries),
            batch=solution.batch(),
            activations=solution.activations(),
            predicted=result.cost_of(program.program, values, self._constant(mesh)),
            notes=notes,
        )

    def _structural(self, mesh: Mesh, budget: int | None) -> ShardingPlan | None:
        program, spread = structural.formulate(
            self.parameters, self._fabric(mesh), rows=self.rows, optimizer_bytes=self.optimizer_bytes
        )
        values = program.program.solve(self._available(mesh, budget))
        if values is None:
            return None
        specs = {
            name: next(spec for spec, column in stores if values[column] > 0.5)
            for name, stores in program.stores.items()
        }
        return ShardingPlan(
            name="planner",
            mesh=mesh,
            parameters=tuple(entry.planned(specs[entry.name]) for entry in self.entries),
            batch=tuple(axis for axis in ((DATA, MODEL) if spread else (DATA,)) if axis in mesh.axis_names),
            predicted=result.cost_of(program.program, values, self._constant(mesh)),
            notes=self.notes,
        )


def _captured(model: nn.Module, batch: Batch, fixed: Mapping[str, Spec]) -> _Captured:
    """Two of each row of equal layers if that works, all of them otherwise."""
    for reduce in (True, False):
        try:
            found = capture(model, batch, fixed, reduce=reduce)
        except CaptureError:
            if not reduce:
                raise
            continue
        graph = build(found)
        folded = fold(graph, found.skeleton)
        if folded.complete or not reduce:
            return _Captured(capture=found, graph=graph, folded=folded)
    raise CaptureError("no graph")


def _parameters(entries: Sequence[inventory.Entry], classes: Mapping[str, str]) -> dict[str, Parameter]:
    found: dict[str, Parameter] = {}
    for entry in entries:
        name = classes[entry.name]
        if name in found:
            found[name] = replace(found[name], count=found[name].count + 1)
        else:
            found[name] = Parameter(
                name=name,
                shape=tuple(entry.tensor.shape),
                itemsize=entry.tensor.element_size(),
                trainable=entry.tensor.requires_grad,
                count=1,
                fixed=entry.fixed,
            )
    return found


def _idle(plan: ShardingPlan) -> bool:
    """Whether nothing is split over the model axis."""
    specs = [item.spec for item in plan.parameters] + [item.spec for item in plan.activations] + [plan.batch]
    split = {axis for spec in specs for axis in used_axes(spec)}
    return plan.mesh.axis_size(MODEL) > 1 and MODEL not in split


def _same(one: ShardingPlan, other: ShardingPlan) -> bool:
    return (one.parameters, one.batch, one.activations) == (other.parameters, other.batch, other.activations)
