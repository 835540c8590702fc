"""`Planner`: captures a model once, and plans it for any mesh and memory budget."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from xla_adapters.errors import ConfigError
from xla_adapters.sharding.mesh import DATA, MODEL, Mesh, Spec, factorizations, used_axes
from xla_adapters.sharding.plan import ShardingPlan
from xla_adapters.sharding.plan_data import PlanCost
from xla_adapters.sharding.planner.capture import CaptureError, batch_size, capture
from xla_adapters.sharding.planner.costs import Fabric, Parameter, Topology
from xla_adapters.sharding.planner.graph import Captured, build, fold
from xla_adapters.sharding.planner.integer_program import Filter, Formulation, IntegerProgram, formulate_by_parameters
from xla_adapters.sharding.planner.solution import Solution, cost_of, forced, held, propagated_only, whole
from xla_adapters.sharding.templates import NamedParameter, list_parameters


@dataclass(frozen=True, kw_only=True)
class PlannedParameter:
    """One parameter of the user's model.

    Attributes:
        parameter: with its names.
        fixed: its spec, if it is given by the user.
        decided_by: `"planner"`, `"user"` (annotated) or `"override"`.
    """

    parameter: NamedParameter
    fixed: Spec | None = None
    decided_by: str = "planner"

    @property
    def name(self) -> str:
        """As in `named_parameters()`."""
        return self.parameter.names[0]


def _entries(model: nn.Module, fixed: Mapping[str, Spec], overrides: Mapping[str, Spec]) -> list[PlannedParameter]:
    """Lists all parameters, with the specs that are given: annotated ones have priority over overrides.

    Raises:
        ConfigError: `fixed` has an unknown name, or different specs for one parameter.
    """
    parameters = list_parameters(model)
    unknown = sorted(set(fixed) - {name for parameter in parameters for name in parameter.names})
    if unknown:
        raise ConfigError(f"specs are fixed for {', '.join(unknown)}, and the model has no such parameter")
    entries = []
    for parameter in parameters:
        name, *tied = parameter.names
        given = {fixed[item] for item in parameter.names if item in fixed}
        if len(given) > 1:
            raise ConfigError(f"{name} is tied to {', '.join(tied)}, and their fixed specs differ: {given}")
        matching = [
            spec for pattern, spec in overrides.items() if any(fnmatchcase(item, pattern) for item in parameter.names)
        ]
        if given:
            entries.append(PlannedParameter(parameter=parameter, fixed=given.pop(), decided_by="user"))
        elif matching:
            entries.append(PlannedParameter(parameter=parameter, fixed=matching[0], decided_by="override"))
        else:
            entries.append(PlannedParameter(parameter=parameter))
    return entries


def memory_of(plan: ShardingPlan) -> float:
    """The predicted bytes on a device; 0 if there is no prediction."""
    return plan.predicted.memory_bytes if plan.predicted is not None else 0.0


def is_idle(plan: ShardingPlan) -> bool:
    """Whether the mesh has a model axis over which nothing is split."""
    specs = [item.spec for item in plan.parameters] + [item.spec for item in plan.activations] + [plan.batch]
    split = {axis for spec in specs for axis in used_axes(spec)}
    return plan.mesh.axis_size(MODEL) > 1 and MODEL not in split


def are_same(one: ShardingPlan, other: ShardingPlan) -> bool:
    """Whether two plans split the same in the same way."""
    return (one.parameters, one.batch, one.activations) == (other.parameters, other.batch, other.activations)


def by_time(plan: ShardingPlan) -> tuple[float, int, tuple[int, ...]]:
    """A sort key: the predicted time to six digits, then the number of constraints."""
    seconds = plan.predicted.step_seconds if plan.predicted is not None else 0.0
    return (float(f"{seconds:.6g}"), len(plan.activations), tuple(-size for size in plan.mesh.shape))


Batch = Mapping[str, Any] | Sequence[Any]
# Rounds of solving with a budget corrected by the peak of the last plan.
_CORRECTIONS = 4


@dataclass(frozen=True, kw_only=True)
class Planner:
    """A captured model that can be planned for any mesh. Create it with `begin`.

    Attributes:
        model, batch, around: as for `begin`.
        entries: the model's parameters.
        parameters: classes of parameters, by the name that represents the class.
        classes: by name of a parameter, the name that represents its class.
        captured: the graph; None if the model could not be captured.
        rows: size of the batch.
        batch_bytes: bytes of the whole batch.
        topology: of devices and links.
        notes: for the plans.
    """

    model: nn.Module
    batch: Batch
    around: Callable[[], AbstractContextManager[Any]]
    entries: list[PlannedParameter]
    parameters: Mapping[str, Parameter]
    classes: Mapping[str, str]
    captured: Captured | None
    rows: int
    batch_bytes: float
    topology: Topology
    notes: tuple[str, ...]

    @classmethod
    def begin(
        cls,
        model: nn.Module,
        batch: Batch,
        *,
        topology: Topology,
        fixed: Mapping[str, Spec] | None = None,
        overrides: Mapping[str, Spec] | None = None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Planner:
        """Captures the model, without weights.

        Args:
            model: on any device, also meta; it is not changed.
            batch: the global batch: keyword arguments of `forward`, or positional ones; only shapes and dtypes matter.
            topology: of devices and links.
            fixed: specs of parameters that are already annotated; they are kept.
            overrides: specs by name pattern.
            around: returns the context that forward passes run in.
        """
        entries = _entries(model, fixed or {}, overrides or {})
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
            notes=notes,
        )

    def best(self, meshes: Sequence[Mesh], budget: int | None, *, given: bool) -> list[ShardingPlan]:
        """Plans with their predicted cost, the fastest first; up to two for each mesh.

        These are one whose activations GSPMD propagates from the parameters, and, if it differs, one that needs its
        constraints on `activations`.

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

        Activations have the layouts of the plan's constraints or, without any, those that GSPMD (Xu et al., arXiv
        2105.04663) propagates. What a plan leaves open is chosen for the fastest step.

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
        for entry in self.entries:
            if entry.fixed is not None:
                mesh.check(entry.name, tuple(entry.parameter.value.shape), entry.fixed)

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
            values = program.solve(self._available(mesh, budget))
            return None if values is None else self._plan(mesh, program, values)
        # The program adds up what does not live at the same time: its budget is corrected by the peak of earlier plans.
        limit: float | None = None
        for _ in range(_CORRECTIONS):
            values = program.solve(limit)
            if values is None:
                break
            plan = self._plan(mesh, program, values)
            excess = memory_of(plan) - budget
            if excess <= 0:
                return plan
            limit = min(limit or math.inf, max(1e-3, program.size(values) - excess))
        plan = self._plan(mesh, program, program.smallest())
        return plan if memory_of(plan) <= budget else None

    def least_memory(self, mesh: Mesh) -> float:
        """Bytes per device of the plan that needs the least memory."""
        if self.captured is None:
            fabric = self._fabric(mesh)
            program = formulate_by_parameters(self.parameters, fabric, rows=self.rows)[0]
            return program.size(program.smallest()) + sum(self._constant(mesh).values())
        programs = [self._formulate(mesh, [propagated_only], follow=True), self._formulate(mesh, [], follow=False)]
        return min(memory_of(self._plan(mesh, item, item.smallest())) for item in programs)

    def cost(self, plan: ShardingPlan) -> PlanCost:
        """The predicted cost of a step under a plan; its specs must be those of `parameters`."""
        if self.captured is None:
            found = self._structural(plan.mesh, None)
            return found.predicted or PlanCost() if found is not None else PlanCost()
        axes = {axis for item in plan.activations for axis in used_axes(item.spec)} | set(plan.batch)
        follow = MODEL not in axes
        filters: list[Filter] = [propagated_only] if follow else []
        filters += forced(plan, self.captured, self._fabric(plan.mesh))
        # A plan whose layouts are not all reached by propagation is taken without its constraints.
        for kept in (filters, filters[: int(follow)]):
            program = self._formulate(plan.mesh, kept, follow=follow)
            values = program.solve(None)
            if values is not None:
                break
        assert values is not None
        peak = self._solution(plan.mesh, program, values).peak()
        return cost_of(program, values, self._constant(plan.mesh, plan.batch), peak)

    def _fabric(self, mesh: Mesh) -> Fabric:
        return Fabric(mesh=mesh, topology=self.topology)

    def _constant(self, mesh: Mesh, batch: Sequence[str] = ()) -> dict[str, float]:
        parts = math.prod(mesh.axis_size(axis) for axis in batch or (DATA,) if axis in mesh.axis_names)
        return {"batch": self.batch_bytes / parts}

    def _available(self, mesh: Mesh, budget: int | None) -> float | None:
        """Bytes that are left for the program's choices; never 0, since the program divides by it."""
        return None if budget is None else max(1e-3, budget - sum(self._constant(mesh).values()))

    def _formulate(self, mesh: Mesh, filters: Sequence[Filter], *, follow: bool) -> IntegerProgram:
        assert self.captured is not None
        return Formulation(
            model=self.captured,
            parameters=self.parameters,
            fabric=self._fabric(mesh),
            filters=filters,
            held=held(self.captured),
            follow=follow,
        ).write()

    def _solution(self, mesh: Mesh, program: IntegerProgram, values: Sequence[float]) -> Solution:
        assert self.captured is not None
        return Solution(
            model=self.captured,
            fabric=self._fabric(mesh),
            program=program,
            values=values,
        )

    def _plan(self, mesh: Mesh, program: IntegerProgram, values: Sequence[float]) -> ShardingPlan:
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
                entry.parameter.planned(
                    specs[self.classes[entry.name]], entry.decided_by, used.get(self.classes[entry.name])
                )
                for entry in self.entries
            ),
            batch=batch,
            activations=solution.activations(),
            predicted=cost_of(program, values, self._constant(mesh, batch), solution.peak()),
            notes=notes,
        )

    def _structural(self, mesh: Mesh, budget: int | None) -> ShardingPlan | None:
        program, spread = formulate_by_parameters(self.parameters, self._fabric(mesh), rows=self.rows)
        values = program.solve(self._available(mesh, budget))
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
                entry.parameter.planned(
                    specs[entry.name],
                    entry.decided_by,
                    whole(specs[entry.name]) if MODEL in used_axes(specs[entry.name]) else None,
                )
                for entry in self.entries
            ),
            batch=tuple(axis for axis in ((DATA, MODEL) if spread else (DATA,)) if axis in mesh.axis_names),
            predicted=cost_of(program, values, self._constant(mesh)),
            notes=self.notes,
        )


def _captured(model: nn.Module, batch: Batch, fixed: Mapping[str, Spec]) -> Captured:
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
            return Captured(graph=graph, folded=folded, skeleton=found.skeleton)
    raise CaptureError("no graph")


def _parameters(entries: Sequence[PlannedParameter], classes: Mapping[str, str]) -> dict[str, Parameter]:
    found: dict[str, Parameter] = {}
    for entry in entries:
        name = classes[entry.name]
        if name in found:
            found[name] = replace(found[name], count=found[name].count + 1)
        else:
            found[name] = Parameter(
                name=name,
                shape=tuple(entry.parameter.value.shape),
                itemsize=entry.parameter.value.element_size(),
                trainable=entry.parameter.value.requires_grad,
                count=1,
                fixed=entry.fixed,
            )
    return found


def meshes_of(mesh: Mesh | None, devices: int) -> list[Mesh]:
    """The given mesh, or all (data, model) meshes of so many devices."""
    return [mesh] if mesh is not None else [Mesh.data_and_model(*shape) for shape in factorizations(devices, 2)]
