"""`Planner`: captures a model once, and plans it for any mesh and memory budget."""

from __future__ import annotations

import math
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
from xla_adapters.sharding.plan import ShardingPlan
from xla_adapters.sharding.plan_data import PlanCost
from xla_adapters.sharding.planner import inventory, problem, result, structural
from xla_adapters.sharding.planner.capture import Capture, CaptureError, batch_size, capture
from xla_adapters.sharding.planner.comparing import are_same, by_time, is_idle, memory_of
from xla_adapters.sharding.planner.costs import Fabric
from xla_adapters.sharding.planner.fold import Folded, fold
from xla_adapters.sharding.planner.graph import Graph, build
from xla_adapters.sharding.planner.storage import Parameter
from xla_adapters.sharding.planner.strategies import Rules
from xla_adapters.sharding.planner.strategy_filters import forced, propagated_only
from xla_adapters.sharding.planner.topology import Topology

Batch = Mapping[str, Any] | Sequence[Any]
# Rounds of solving with a budget corrected by the peak of the last plan.
_CORRECTIONS = 4


@dataclass(frozen=True, kw_only=True)
class _Captured:
    """The graph of a model, and the classes of its equal layers."""

    capture: Capture
    graph: Graph
    folded: Folded


@dataclass(frozen=True, kw_only=True)
class Planner:
    """A captured model that can be planned for any mesh. Create it with `begin`.

    Attributes:
        model, batch, around: as for `plan_model`.
        entries: the model's parameters.
        parameters: classes of parameters, by the name that represents the class.
        classes: by name of a parameter, the name that represents its class.
        captured: the graph; None if the model could not be captured.
        rows: size of the batch.
        batch_bytes: bytes of the whole batch.
        topology: of devices and links.
        optimizer_bytes: bytes of optimizer state per element of a trainable parameter; None for Adam's.
        notes: for the plans.
    """

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
    optimizer_bytes: float | None
    notes: tuple[str, ...]

    @classmethod
    def begin(
        cls,
        model: nn.Module,
        batch: Batch,
        *,
        topology: Topology,
        optimizer_bytes: float | None = None,
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
            meshes: to try; all have the same number of devices.
            budget: bytes per device; None for no limit.
            given: whether the user chose the mesh; then a mesh that cannot be used is an error.

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
        # A plan that does not use the model axis wastes devices; it is only returned if the user chose the mesh.
        plans = [plan for plan in plans if given or not is_idle(plan)] or plans
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
        """The predicted cost of a step under each of these plans.

        Raises:
            ConfigError: a plan is for another model, or its mesh does not divide the batch.
        """
        costs = []
        for plan in plans:
            specs = {name: plan.spec_of(name) for name in sorted(entry.name for entry in self.entries)}
            decided = self.given(specs)
            if decided is None:
                # The plan has different specs for layers that are one class here.
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
        """The same model with all specs given; None if parameters of one class have different specs."""
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
        """The fastest plan that GSPMD propagates by itself and, unless `follow`, the fastest of all if it differs.

        Args:
            mesh: to plan for.
            budget: bytes per device; None for no limit.
            follow: whether to return the first one only.
        """
        if self.captured is None:
            plan = self._structural(mesh, budget)
            return [plan] if plan is not None else []
        found: list[ShardingPlan] = []
        for follows in (True,) if follow or self._fabric(mesh).model == 1 else (True, False):
            plan = self._solved(mesh, budget, follow=follows)
            if plan is not None and not any(are_same(plan, other) for other in found):
                found.append(plan)
        return found

    def usable(self, mesh: Mesh, budget: int | None, *, follow: bool = False) -> list[ShardingPlan]:
        """As `plans`, without plans that do not use the mesh's model axis; empty if the mesh does not fit the model."""
        try:
            self.check(mesh)
        except ConfigError:
            return []
        return [plan for plan in self.plans(mesh, budget, follow=follow) if not is_idle(plan)]

    def _solved(self, mesh: Mesh, budget: int | None, *, follow: bool) -> ShardingPlan | None:
        program = self._formulate(mesh, [propagated_only] if follow else [], follow=follow)
        if not self.topology.recomputes or budget is None:
            values = program.program.solve(self._available(mesh, budget))
            return None if values is None else self._plan(mesh, program, values)
        # The program adds up what does not live at the same time: its budget is corrected by the peak of earlier plans.
        limit: float | None = None
        for _ in range(_CORRECTIONS):
            values = program.program.solve(limit)
            if values is None:
                break
            plan = self._plan(mesh, program, values)
            excess = memory_of(plan) - budget
            if excess <= 0:
                return plan
            limit = min(limit or math.inf, max(1e-3, program.program.size(values) - excess))
        plan = self._plan(mesh, program, program.program.smallest())
        return plan if memory_of(plan) <= budget else None

    def least_memory(self, mesh: Mesh) -> float:
        """Bytes per device of the plan that needs the least memory."""
        if self.captured is None:
            fabric = self._fabric(mesh)
            program = structural.formulate(
                self.parameters, fabric, rows=self.rows, optimizer_bytes=self.optimizer_bytes
            )[0]
            return program.program.size(program.program.smallest()) + sum(self._constant(mesh).values())
        programs = [self._formulate(mesh, [propagated_only], follow=True), self._formulate(mesh, [], follow=False)]
        return min(memory_of(self._plan(mesh, item, item.program.smallest())) for item in programs)

    def cost(self, plan: ShardingPlan) -> PlanCost:
        """The predicted cost of a step under a plan; its specs must be those of `parameters`."""
        if self.captured is None:
            found = self._structural(plan.mesh, None)
            return found.predicted or PlanCost() if found is not None else PlanCost()
        rules = Rules(fabric=self._fabric(plan.mesh))
        axes = {axis for item in plan.activations for axis in used_axes(item.spec)} | set(plan.batch)
        follow = MODEL not in axes
        filters: list[problem.Filter] = [propagated_only] if follow else []
        filters += forced(plan, self.captured.graph, self.captured.folded, self.captured.capture.skeleton, rules)
        # A plan whose layouts are not all reached by propagation is taken without its constraints.
        for kept in (filters, filters[: int(follow)]):
            program = self._formulate(plan.mesh, kept, follow=follow)
            values = program.program.solve(None)
            if values is not None:
                break
        assert values is not None
        peak = self._solution(plan.mesh, program, values).peak()
        return result.cost_of(program.program, values, self._constant(plan.mesh, plan.batch), peak)

    def _fabric(self, mesh: Mesh) -> Fabric:
        return Fabric(mesh=mesh, topology=self.topology)

    def _constant(self, mesh: Mesh, batch: Sequence[str] = ()) -> dict[str, float]:
        parts = math.prod(mesh.axis_size(axis) for axis in batch or (DATA,) if axis in mesh.axis_names)
        return {"batch": self.batch_bytes / parts}

    def _available(self, mesh: Mesh, budget: int | None) -> float | None:
        """Bytes that are left for the program's choices; never 0, since the program divides by it."""
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

    def _solution(self, mesh: Mesh, program: problem.Problem, values: Sequence[float]) -> result.Solution:
        assert self.captured is not None
        return result.Solution(
            graph=self.captured.graph,
            folded=self.captured.folded,
            skeleton=self.captured.capture.skeleton,
            rules=Rules(fabric=self._fabric(mesh)),
            problem=program,
            values=values,
        )

    def _plan(self, mesh: Mesh, program: problem.Problem, values: Sequence[float]) -> ShardingPlan:
        assert self.captured is not None
        solution = self._solution(mesh, program, values)
        notes = self.notes
        if self.captured.graph.unknown:
            listed = ", ".join(sorted(self.captured.graph.unknown))
            notes = (*notes, f"no strategy is known for {listed}: what they take and give is whole on the model axis")
        specs, used, batch = solution.specs(), solution.used(), solution.batch()
        return ShardingPlan(
            name="planner",
            mesh=mesh,
            parameters=tuple(
                entry.planned(specs[self.classes[entry.name]], used.get(self.classes[entry.name]))
                for entry in self.entries
            ),
            batch=batch,
            activations=solution.activations(),
            predicted=result.cost_of(program.program, values, self._constant(mesh, batch), solution.peak()),
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
    """Captures two of each run of equal layers if that works, else the whole model."""
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
