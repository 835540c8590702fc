"""`Planner`: a model that was captured once, planned for any mesh and budget."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from xla_adapters.errors import ConfigError
from xla_adapters.sharding.mesh import DATA, MODEL, Mesh, Spec, used_axes
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


@dataclass(frozen=True, kw_only=True)
class _Captured:
    capture: Capture
    graph: Graph
    folded: Folded


@dataclass(frozen=True, kw_only=True)
class Planner:
    """A model ready to be planned for any mesh; `begin` makes one."""

    model: nn.Module
    batch: Batch
    around: Callable[[], AbstractContextManager[Any]]
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
        *,
        topology: Topology,
        optimizer_bytes: float = ADAM_BYTES,
        fixed: Mapping[str, Spec] | None = None,
        overrides: Mapping[str, Spec] | None = None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Planner:
        """Captures the model; the arguments are those of `plan_model`."""
        entries = inventory.take(model, fixed or {}, overrides or {})
        given = {entry.name: entry.fixed for entry in entries if entry.fixed is not None}
        notes: tuple[str, ...] = ()
        captured = None
        try:
            with around():
                captured = _captured(model, batch, given)
        except CaptureError as error:
            note = (
                f"the model could not be captured as a graph ({error}): planned by parameters alone, the batch over "
                "all devices"
            )
            warnings.warn(note, stacklevel=3)
            notes = (note,)
        classes = {
            entry.name: captured.folded.parameters.of(entry.name) if captured is not None else entry.name
            for entry in entries
        }
        leaves = [leaf for leaf in _pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        return cls(
            model=model,
            batch=batch,
            around=around,
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

    def best(self, meshes: Sequence[Mesh], budget: int | None, *, given: bool) -> list[ShardingPlan]:
        """Plans with their predicted cost, the fastest first; up to two for each mesh.

        Args:
            meshes: to try; all of as many devices.
            budget: bytes per device; None for no limit.
            given: whether the mesh is the user's own choice, which is not passed over in silence.

        Raises:
            ConfigError: nothing fits the budget, or the batch or a given spec fits no mesh.
        """
        devices = meshes[0].size
        plans: list[ShardingPlan] = []
        least: list[float] = []
        reasons: list[str] = []
        for mesh in meshes:
            try:
                self.check(mesh)
            except ConfigError as error:
                if given:
                    raise
                reasons.append(str(error))
                continue
            found = self.plans(mesh, budget)
            plans += found
            if not found:
                least.append(self.least_memory(mesh))
        # Devices that all do the same are no use; where a mesh is given, that is the user's wish.
        plans = [plan for plan in plans if given or not _idle(plan)] or plans
        if not plans and least:
            raise ConfigError(
                f"memory_budget={budget} bytes per device is too little: the smallest that any plan for {devices} "
                f"devices takes is {round(min(least))} bytes; use more devices, a smaller batch, gradient "
                "checkpointing or a larger budget"
            )
        if not plans:
            raise ConfigError(f"no mesh of {devices} devices can be used: {'; '.join(sorted(set(reasons)))}")
        return sorted(plans, key=by_time)

    def costs(self, plans: Sequence[ShardingPlan]) -> list[PlanCost]:
        """What a step costs under plans that somebody else made.

        Raises:
            ConfigError: a plan is for another model, or its mesh does not divide the batch.
        """
        costs = []
        for plan in plans:
            specs = {name: plan.spec_of(name) for name in sorted(entry.name for entry in self.entries)}
            decided = self.given(specs)
            if decided is None:
                # Layers that are one here lie in different ways there.
                decided = Planner.begin(
                    self.model,
                    self.batch,
                    topology=self.topology,
                    optimizer_bytes=self.optimizer_bytes,
                    fixed=specs,
                    around=self.around,
                )
            decided.check(plan.mesh)
            costs.append(decided.cost(plan))
        return costs

    def given(self, specs: Mapping[str, Spec]) -> Planner | None:
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

    def plans(self, mesh: Mesh, budget: int | None, *, follow: bool = False) -> list[ShardingPlan]:
        """The best plan that GSPMD follows by itself, and the best of all where that is another and is asked for."""
        if self.captured is None:
            plan = self._structural(mesh, budget)
            return [plan] if plan is not None else []
        found: list[ShardingPlan] = []
        for follows in (True,) if follow or self._fabric(mesh).model == 1 else (True, False):
            plan = self._solved(mesh, budget, follow=follows)
            if plan is not None and not any(_same(plan, other) for other in found):
                found.append(plan)
        return found

    def usable(self, mesh: Mesh, budget: int | None, *, follow: bool = False) -> list[ShardingPlan]:
        """`plans`; none if the mesh is no use for this model."""
        try:
            self.check(mesh)
        except ConfigError:
            return []
        return [plan for plan in self.plans(mesh, budget, follow=follow) if not _idle(plan)]

    def _solved(self, mesh: Mesh, budget: int | None, *, follow: bool) -> ShardingPlan | None:
        program = self._formulate(mesh, [without_cuts] if follow else [], follow=follow)
        values = program.program.solve(self._available(mesh, budget))
        return None if values is None else self._plan(mesh, program, values)

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
            held=result.held(self.captured.graph, self.captured.folded, self.captured.capture.skeleton),
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
        specs, used = solution.specs(), solution.used()
        return ShardingPlan(
            name="planner",
            mesh=mesh,
            parameters=tuple(
                entry.planned(specs[self.classes[entry.name]], used.get(self.classes[entry.name]))
                for entry in self.entries
            ),
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
            parameters=tuple(
                entry.planned(
                    specs[entry.name],
                    result.whole(specs[entry.name]) if MODEL in used_axes(specs[entry.name]) else None,
                )
                for entry in self.entries
            ),
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


def by_time(plan: ShardingPlan) -> tuple[float, int, tuple[int, ...]]:
    """Sorts plans by their predicted time, to six digits; then the simpler one first."""
    seconds = plan.predicted.step_seconds if plan.predicted is not None else 0.0
    return (float(f"{seconds:.6g}"), len(plan.activations), tuple(-size for size in plan.mesh.shape))
