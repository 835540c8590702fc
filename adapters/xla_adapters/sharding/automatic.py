"""`automatic_plan`: compares the planner's plans with the templates, and takes the cheapest."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree

from xla_adapters.errors import ConfigError
from xla_adapters.runtime import get_runtime
from xla_adapters.sharding.config import MEASURED_PLANS, ShardingConfig
from xla_adapters.sharding.measure import MeasuringError, PlanCache, PlanCompiler, PlanResult, compiler_for
from xla_adapters.sharding.measure.plan_cache import digest_of, digest_of_step
from xla_adapters.sharding.mesh import Mesh, Spec, factorizations
from xla_adapters.sharding.plan import ShardingPlan
from xla_adapters.sharding.plan_data import Alternative, PlanCost, tiles_of_plan
from xla_adapters.sharding.planner import ADAM_COPIES, Planner, Topology, by_time, collective_seconds, meshes_of
from xla_adapters.sharding.templates import default_mesh, template

logger = logging.getLogger("xla_adapters")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan with the time and memory by which it is compared.

    Attributes:
        plan: with its prediction, and its measurement if there is one.
        seconds: time of a step.
        memory_bytes: per device.
        fits: False if its parameters and optimizer state, or the compiler, say that it does not fit a device.
        problem: why the measurement failed, if it did.
    """

    plan: ShardingPlan
    seconds: float
    memory_bytes: float
    fits: bool = True
    problem: str = ""


def distinct(plans: Sequence[ShardingPlan]) -> list[ShardingPlan]:
    """The plans without duplicates: plans with equal tile assignments, even if their meshes have other axis names."""
    found: dict[Hashable, ShardingPlan] = {}
    for plan in plans:
        found.setdefault(tiles_of_plan(plan), plan)
    return list(found.values())


def predicted(plan: ShardingPlan, problem: str = "") -> Candidate:
    """The candidate with the plan's predicted cost."""
    cost = plan.predicted if plan.predicted is not None else PlanCost()
    return Candidate(plan=plan, seconds=cost.step_seconds, memory_bytes=cost.memory_bytes, problem=problem)


def measured(
    plans: Sequence[ShardingPlan],
    model: torch.nn.Module,
    batch: Any,
    topology: Topology,
    around: Callable[[], AbstractContextManager[Any]],
    kept: PlanCache | None,
    compiler: PlanCompiler,
) -> list[Candidate]:
    """The candidates with the cost of their compiled steps.

    Plans that could not be compiled are left out. If none could be, all are returned with their predictions.

    Args:
        plans: with their predictions.
        model, batch, around: as for `measure_plans`.
        topology: for the bandwidths, to convert bytes to seconds.
        kept: stores measurements between runs.
        compiler: compiles the steps.
    """
    known = kept.results() if kept is not None else {}
    digests = [digest_of_step(model, batch, plan, compiler.name) for plan in plans]
    missing = [plan for plan, digest in zip(plans, digests, strict=True) if digest not in known]
    if missing:
        logger.info(
            "sharding: %d plans are compiled to be compared, in a process of their own; measure_top_k=0 lets "
            "predictions decide instead",
            len(missing),
        )
        try:
            new = iter(compiler.measure(model, batch, missing, around=around))
        except MeasuringError as error:
            logger.warning("sharding: plans are compared by prediction: %s", error)
            return [predicted(plan, str(error)) for plan in plans]
        known.update({digest: next(new) for digest in digests if digest not in known})
        if kept is not None:
            kept.keep_results({digest: result for digest, result in known.items() if not result.problem})
    results = [known[digest] for digest in digests]
    for plan, result in zip(plans, results, strict=True):
        if result.problem:
            logger.warning("sharding: %s on %s was not measured: %s", plan.name, plan.mesh, result.problem)
    found = [_judged(plan, result, topology) for plan, result in zip(plans, results, strict=True) if not result.problem]
    return found or [predicted(plan, result.problem) for plan, result in zip(plans, results, strict=True)]


def _judged(plan: ShardingPlan, result: PlanResult, topology: Topology) -> Candidate:
    assert result.measurement is not None
    compute = plan.predicted.compute_seconds if plan.predicted is not None else 0.0
    return Candidate(
        plan=dataclasses.replace(plan, measured=result.measurement),
        seconds=compute + collective_seconds(result.collectives, topology),
        memory_bytes=result.measurement.memory_bytes,
        fits=result.fits,
    )


def cheapest(candidates: Sequence[Candidate], budget: int | None, *, within: float = 0.0) -> Candidate:
    """The fastest candidate that fits the memory budget.

    Args:
        candidates: to compare.
        budget: bytes per device; None for no limit.
        within: a share of the fastest step. Times of measured plans that differ by no more are taken to be equal: then
            the one that sends least is returned.

    Raises:
        ConfigError: none fits.
    """
    fitting = [candidate for candidate in candidates if _fits(candidate, budget)]
    if not fitting:
        least = min(candidate.memory_bytes for candidate in candidates)
        limit, more = "the memory of a device is", ""
        if budget is not None:
            limit, more = f"memory_budget={budget} bytes per device is", " or a larger budget"
        raise ConfigError(
            f"{limit} too little: the smallest that any plan takes is {round(least)} bytes; use more devices, a "
            f"smaller batch{',' if more else ' or'} gradient checkpointing{more}"
        )
    ordered = sorted(fitting, key=_order)
    sent = [
        (candidate.plan.measured.wire_bytes, place)
        for place, candidate in enumerate(ordered)
        if candidate.plan.measured is not None and candidate.seconds <= (1 + within) * ordered[0].seconds
    ]
    return ordered[min(sent)[1] if within and sent else 0]


def alternatives(candidates: Sequence[Candidate], budget: int | None) -> tuple[Alternative, ...]:
    """Summaries of the candidates for the report, the fastest first."""
    listed = []
    for candidate in sorted(candidates, key=_order):
        plan, cost = candidate.plan, candidate.plan.predicted or PlanCost()
        listed.append(
            Alternative(
                name=plan.name,
                mesh=str(plan.mesh),
                predicted_wire_bytes=cost.wire_bytes,
                predicted_memory_bytes=cost.memory_bytes,
                seconds=candidate.seconds,
                measured=plan.measured,
                remark=_remark(candidate, budget),
            )
        )
    return tuple(listed)


def _fits(candidate: Candidate, budget: int | None) -> bool:
    return candidate.fits and (budget is None or candidate.memory_bytes <= budget)


def _remark(candidate: Candidate, budget: int | None) -> str:
    if not candidate.fits:
        return "more than a device has"
    return "" if _fits(candidate, budget) else "more than memory_budget"


def _order(candidate: Candidate) -> tuple[float, float]:
    # Rounded, so that costs which differ by rounding errors are equal; then memory counts.
    return (float(f"{candidate.seconds:.4g}"), candidate.memory_bytes)


# Share of a device's memory that a plan may use.
_USABLE = 0.9
# Rounds of planning with a budget corrected by the measured memory of earlier plans.
_CORRECTIONS = 4
_SLACK = 0.998
# Times of TPUs are computed from published figures, and do not tell plans apart whose times are this close; what a plan
# sends is counted.
_SAME_TIME = 0.05


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
    """The cheapest plan that fits the memory, of the planner's plans and the templates; compiled steps are measured.

    Args:
        model: on any device.
        config: the options.
        devices: number of devices.
        mesh: to use; None to choose.
        fixed: specs of parameters that must keep their sharding.
        example: returns a batch; None, or a result of None, if no batch can be taken from the dataset.
        around: returns the context that forward passes run in; another process must be able to import it.
        folder: where the plan is stored for a restart; None stores it beside the compiled programs only.

    Raises:
        ConfigError: nothing fits the memory budget.
    """
    batch = example() if example is not None else None
    if batch is None:
        return _without_batch(model, config, mesh or default_mesh("fsdp", devices), fixed)
    topology, notes = _topology(config)
    kept = PlanCache.of_run(folder)
    compiler, top, more = _compiler(config, devices, topology)
    named = "" if compiler is None else compiler.name
    digest = digest_of(model, batch, config, devices, topology.name, fixed, named) if kept is not None else ""
    if kept is not None and (found := kept.find(digest) or kept.find_in_cache(digest)) is not None:
        return found
    budget = config.memory_budget
    if budget is None and topology.name != "cpu":
        # The rest is left for the compiler's temporary values and the runtime.
        config = dataclasses.replace(config, memory_budget=int(_USABLE * topology.memory_bytes))
    search = _Search(model, batch, config, devices, mesh, fixed, topology, around)
    if compiler is not None:
        candidates = search.measured(top, kept, compiler)
    else:
        # The compiler itself refuses what does not fit a device.
        candidates, budget = search.predicted(), config.memory_budget
    best = cheapest(candidates, budget, within=0.0 if topology.name == "cpu" else _SAME_TIME)
    plan = dataclasses.replace(
        best.plan, notes=(*best.plan.notes, *notes, *more), alternatives=alternatives(candidates, budget)
    )
    if kept is not None:
        kept.keep(digest, plan)
    return plan


def _compiler(
    config: ShardingConfig, devices: int, topology: Topology
) -> tuple[PlanCompiler | None, int, tuple[str, ...]]:
    """What compiles the plans, how many of them, and notes; None if predictions decide."""
    top = config.measure_top_k
    if top is None:
        # Compiling for other devices takes minutes: only if it is asked for.
        top = MEASURED_PLANS if topology.name == "cpu" else 0
    if not top:
        return None, 0, ()
    try:
        return compiler_for(config.topology or topology.name, devices), top, ()
    except MeasuringError as error:
        return None, 0, (f"measure_top_k={top}: nothing was measured, predictions decide: {error}",)


class _Search:
    """Makes and compares plans for one model, which is captured once."""

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
        """The planner's plans and the templates, with predicted costs."""
        return [predicted(plan) for plan in [*self._planned(self._config.memory_budget), *self._templates()]]

    def measured(self, top: int, kept: PlanCache | None, compiler: PlanCompiler) -> list[Candidate]:
        """The planner's best plans and the templates, with the costs of their compiled steps.

        Args:
            top: number of the planner's plans to compile.
            kept: stores measurements between runs.
            compiler: compiles the steps.
        """
        budget = self._config.memory_budget
        problem: ConfigError | None = None
        plans: list[ShardingPlan] = []
        try:
            plans = self._planned(budget)[:top]
        except ConfigError as error:
            # A compiled plan may need less memory than predicted.
            if budget is None:
                raise
            problem = error
        tried = distinct([*self._templates(), *plans])
        if not tried and problem is not None:
            raise problem
        found = self._compiled(tried, kept, compiler)
        # For other devices than CPUs their compiler says what fits, too.
        free = budget is None or (self._topology.name != "cpu" and any(item.fits for item in found))
        if free and plans and cheapest(found, None).plan.name != plans[0].name:
            # GSPMD did not follow the plan, so try plans whose layouts it propagates by itself.
            seen = len(tried)
            tried = distinct([*tried, *sorted(self._followed(budget), key=by_time)[:top]])
            found += self._compiled(tried[seen:], kept, compiler)
        latest: list[Candidate] = []
        for _ in range(_CORRECTIONS if budget is not None else 0):
            if self._topology.name != "cpu" and any(item.fits for item in found):
                # Compiling for other devices takes minutes.
                break
            new = self._corrected(latest, found, tried)
            tried += new
            latest = [item for item in self._compiled(new, kept, compiler) if item.plan.measured is not None]
            found += latest
            if not latest:
                break
        return found

    def _compiled(
        self, plans: Sequence[ShardingPlan], kept: PlanCache | None, compiler: PlanCompiler
    ) -> list[Candidate]:
        """The plans with the costs of their compiled steps; those whose state alone is too large are not compiled."""
        large = [plan for plan in plans if _state(plan) > self._topology.memory_bytes]
        small = [plan for plan in plans if plan not in large]
        found = [dataclasses.replace(predicted(plan), fits=False) for plan in large]
        if small:
            found += measured(small, self._model, self._batch, self._topology, self._around, kept, compiler)
        return found

    def _corrected(
        self, latest: Sequence[Candidate], found: Sequence[Candidate], tried: Sequence[ShardingPlan]
    ) -> list[ShardingPlan]:
        """New plans for a budget that is corrected by the prediction errors of compiled plans.

        There are four variants: the error is that of the latest plan on the mesh, or the largest one; and plans are of
        any kind, or such that GSPMD propagates by itself. The best new plan of each variant is returned, if it is
        predicted to be faster than the fastest plan that fits. (Compiling four together takes little longer than one.)
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

    def _followed(self, budget: int | None) -> list[ShardingPlan]:
        meshes = meshes_of(self._mesh, self._devices)
        return [plan for mesh in meshes for plan in self._planner.usable(mesh, budget, follow=True)]

    def _planned(self, budget: int | None) -> list[ShardingPlan]:
        return self._planner.best(meshes_of(self._mesh, self._devices), budget, given=self._mesh is not None)

    def _templates(self) -> list[ShardingPlan]:
        """Each template on each mesh that suits it, with its predicted cost."""
        leaves = _pytree.tree_leaves(self._batch)
        rows = {value.shape[0] for value in leaves if isinstance(value, torch.Tensor) and value.ndim}
        both = [Mesh.data_and_model(*shape) for shape in factorizations(self._devices, 2) if min(shape) > 1]
        templates: list[ShardingPlan] = []
        for scheme in ("dp", "fsdp", "tp", "2d"):
            others = both if scheme == "2d" else [default_mesh(scheme, self._devices)]
            for mesh in [self._mesh] if self._mesh is not None else others:
                try:
                    plan = template(scheme, self._model, mesh, config=self._config, fixed=self._fixed)
                except ConfigError:
                    # The mesh has no axis for this template.
                    continue
                if all(size % _parts(plan) == 0 for size in rows):
                    templates.append(plan)
        costs = self._planner.costs(templates)
        return [dataclasses.replace(plan, predicted=cost) for plan, cost in zip(templates, costs, strict=True)]


def _errors(candidates: Sequence[Candidate], mesh: Mesh | None) -> list[float]:
    """Measured minus predicted memory in bytes of each compiled plan, on one mesh or (None) on all."""
    return [
        candidate.memory_bytes - candidate.plan.predicted.memory_bytes
        for candidate in candidates
        if candidate.plan.predicted is not None
        and candidate.plan.measured is not None
        and (mesh is None or candidate.plan.mesh == mesh)
    ]


def _without_batch(model: torch.nn.Module, config: ShardingConfig, mesh: Mesh, fixed: dict[str, Spec]) -> ShardingPlan:
    reason = "the plan is the template for fully sharded training: there is no batch to plan for (a stream of data)"
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
    """Bytes per device of a parameter and, if it is trained, its gradient and Adam's two averages."""
    copies = 2 + ADAM_COPIES if parameter.requires_grad else 1
    return float(parameter.numel() * parameter.element_size() * copies) / shards


def memory_of_device(config: ShardingConfig) -> tuple[float, str]:
    """Bytes of a device that a training may use, and in words where the figure comes from."""
    if config.memory_budget is not None:
        return config.memory_budget, "memory_budget"
    topology, _ = _topology(config)
    return _USABLE * topology.memory_bytes, f"{_USABLE:.0%} of the memory of {topology.name}; topology= names another"


def _state(plan: ShardingPlan) -> float:
    """Bytes per device of parameters and optimizer state."""
    memory = plan.predicted.memory if plan.predicted is not None else {}
    return sum(memory.get(kind, 0.0) for kind in ("parameters", "optimizer"))


def _parts(plan: ShardingPlan) -> int:
    return math.prod(plan.mesh.axis_size(axis) for axis in plan.batch)


def _topology(config: ShardingConfig) -> tuple[Topology, tuple[str, ...]]:
    if config.topology is not None:
        return Topology.preset(str(config.generation)), ()
    hardware = get_runtime().device.hardware()
    if hardware == "CPU":
        return Topology.preset("cpu"), ()
    return Topology.preset("v5e"), (
        f"planned for links as of a TPU v5e; name the topology of this {hardware} if it has others",
    )
