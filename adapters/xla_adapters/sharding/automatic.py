"""`automatic_plan`: the planner's plans beside the recipes, the cheapest wins."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree

from xla_adapters.backend import get_backend
from xla_adapters.errors import ConfigError
from xla_adapters.sharding.candidates import Candidate, alternatives, cheapest, distinct, measured, predicted
from xla_adapters.sharding.config import ShardingConfig
from xla_adapters.sharding.measure import KeptPlans
from xla_adapters.sharding.measure.kept import digest_of
from xla_adapters.sharding.mesh import Mesh, Spec, factorizations
from xla_adapters.sharding.plan import ShardingPlan
from xla_adapters.sharding.planner import ADAM_BYTES, Planner, Topology, by_time, meshes_of
from xla_adapters.sharding.templates import default_mesh, template

_USABLE = 0.9
# Rounds of plans for a budget that is corrected by what the plans before really took.
_CORRECTIONS = 4
_SLACK = 0.998
MEASURED_PLANS = 2


def automatic_plan(
    model: torch.nn.Module,
    config: ShardingConfig,
    devices: int,
    *,
    mesh: Mesh | None,
    fixed: dict[str, Spec],
    example: Callable[[], Any] | None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    folder: Path | None = None,
) -> ShardingPlan:
    """The plan that costs least: of the planner's and the recipes that fit the memory, measured where that is possible.

    Args:
        model: on any device.
        config: the options.
        devices: how many there are.
        mesh: to use; None to choose.
        fixed: specs of parameters that stay as they are.
        example: returns a batch; None or a result of None is a dataset that cannot be looked into.
        around: gives the context that forward passes run in; a function that another process can import.
        folder: where the plan is kept for a restart; None keeps nothing.

    Raises:
        ConfigError: nothing fits the memory budget.
    """
    batch = example() if example is not None else None
    if batch is None:
        return _without_batch(model, config, mesh or default_mesh("fsdp", devices), fixed)
    topology, notes = _topology(config)
    kept = KeptPlans(folder) if folder is not None else None
    digest = digest_of(model, batch, config, devices, topology.name, fixed) if kept is not None else ""
    if kept is not None and (found := kept.find(digest)) is not None:
        return found
    if config.memory_budget is None and topology.name != "cpu":
        # The rest is for the compiler's temporary values and the runtime.
        config = dataclasses.replace(config, memory_budget=int(_USABLE * topology.memory_bytes))
    top = MEASURED_PLANS if config.measure_top_k is None else config.measure_top_k
    if top and topology.name != "cpu":
        if config.measure_top_k is not None:
            notes += (f"measure_top_k={top}: nothing was measured, as plans are compiled for CPU devices only",)
        top = 0
    search = _Search(model, batch, config, devices, mesh, fixed, topology, around)
    candidates = search.measured(top, kept) if top else search.predicted()
    best = cheapest(candidates, config.memory_budget)
    plan = dataclasses.replace(
        best.plan, notes=(*best.plan.notes, *notes), alternatives=alternatives(candidates, config.memory_budget)
    )
    if kept is not None:
        kept.keep(digest, plan)
    return plan


class _Search:
    """Looks for plans of one model; it is captured once."""

    def __init__(
        self,
        model: torch.nn.Module,
        batch: Any,
        config: ShardingConfig,
        devices: int,
        mesh: Mesh | None,
        fixed: dict[str, Spec],
        topology: Topology,
        around: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._model, self._batch, self._config, self._devices = model, batch, config, devices
        self._mesh, self._fixed, self._topology, self._around = mesh, fixed, topology, around
        self._planner = Planner.begin(
            model, batch, topology=topology, fixed=fixed, overrides=config.overrides, around=around
        )

    def predicted(self) -> list[Candidate]:
        """The planner's plans and the recipes, by their predicted costs."""
        return [predicted(plan) for plan in [*self._planned(self._config.memory_budget), *self._recipes()]]

    def measured(self, top: int, kept: KeptPlans | None) -> list[Candidate]:
        """The planner's best plans and the recipes, compiled."""
        budget = self._config.memory_budget
        problem: ConfigError | None = None
        plans: list[ShardingPlan] = []
        try:
            plans = self._planned(budget)[:top]
        except ConfigError as error:
            # What is compiled may need less than was predicted.
            if budget is None:
                raise
            problem = error
        tried = distinct([*self._recipes(), *plans])
        if not tried and problem is not None:
            raise problem
        found = self._compiled(tried, kept)
        if budget is None and plans and cheapest(found, None).plan.name != plans[0].name:
            # GSPMD did otherwise than was planned: plans for what it does by itself.
            seen = len(tried)
            tried = distinct([*tried, *sorted(self._followed(), key=by_time)[:top]])
            found += self._compiled(tried[seen:], kept)
        latest: list[Candidate] = []
        for _ in range(_CORRECTIONS if budget is not None else 0):
            new = self._corrected(latest, found, tried)
            tried += new
            latest = [item for item in self._compiled(new, kept) if item.plan.measured is not None]
            found += latest
            if not latest:
                break
        return found

    def _compiled(self, plans: Sequence[ShardingPlan], kept: KeptPlans | None) -> list[Candidate]:
        return measured(plans, self._model, self._batch, self._topology, self._around, kept) if plans else []

    def _corrected(
        self, latest: Sequence[Candidate], found: Sequence[Candidate], tried: Sequence[ShardingPlan]
    ) -> list[ShardingPlan]:
        """New plans for what the budget is in predictions, which err by what those that were compiled show.

        On each mesh as the latest did, or as the one that took most more than was said; of any kind, or for what GSPMD
        does by itself. To compile the best of each together takes little longer than one alone. None that would not be
        faster than what fits already.
        """
        known, new = list(tried), []
        limit = self._config.memory_budget or 0
        fastest = min((item.seconds for item in found if item.memory_bytes <= limit), default=math.inf)
        for wary, follow in itertools.product((False, True), repeat=2):
            plans: list[ShardingPlan] = []
            for mesh in meshes_of(self._mesh, self._devices):
                errors = _errors(found, mesh) or _errors(found, None)
                hopeful = min(_errors(latest, mesh), default=min(errors, key=abs, default=0.0))
                error = max(errors, default=0.0) if wary else hopeful
                plans += self._planner.usable(mesh, int(_SLACK * limit - error), follow=follow)
            for plan in sorted(plans, key=by_time):
                seconds = plan.predicted.step_seconds if plan.predicted is not None else 0.0
                if seconds < fastest and len(distinct([*known, plan])) > len(known):
                    known.append(plan)
                    new.append(plan)
                    break
        return new

    def _followed(self) -> list[ShardingPlan]:
        meshes = meshes_of(self._mesh, self._devices)
        return [plan for mesh in meshes for plan in self._planner.usable(mesh, None, follow=True)]

    def _planned(self, budget: int | None) -> list[ShardingPlan]:
        return self._planner.best(meshes_of(self._mesh, self._devices), budget, given=self._mesh is not None)

    def _recipes(self) -> list[ShardingPlan]:
        """Each recipe on each mesh it makes sense on, with its predicted cost."""
        leaves = _pytree.tree_leaves(self._batch)
        rows = {value.shape[0] for value in leaves if isinstance(value, torch.Tensor) and value.ndim}
        both = [Mesh.data_and_model(*shape) for shape in factorizations(self._devices, 2) if min(shape) > 1]
        recipes: list[ShardingPlan] = []
        for scheme in ("dp", "fsdp", "tp", "2d"):
            others = both if scheme == "2d" else [default_mesh(scheme, self._devices)]
            for mesh in [self._mesh] if self._mesh is not None else others:
                try:
                    recipe = template(scheme, self._model, mesh, config=self._config, fixed=self._fixed)
                except ConfigError:
                    # The mesh has no axis for it: no candidate.
                    continue
                if all(size % _parts(recipe) == 0 for size in rows):
                    recipes.append(recipe)
        costs = self._planner.costs(recipes)
        return [dataclasses.replace(recipe, predicted=cost) for recipe, cost in zip(recipes, costs, strict=True)]


def _errors(candidates: Sequence[Candidate], mesh: Mesh | None) -> list[float]:
    """How many bytes more than predicted the steps take that were compiled, on a mesh or on any."""
    return [
        candidate.memory_bytes - candidate.plan.predicted.memory_bytes
        for candidate in candidates
        if candidate.plan.predicted is not None
        and candidate.plan.measured is not None
        and (mesh is None or candidate.plan.mesh == mesh)
    ]


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
