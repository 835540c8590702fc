"""`Candidate`: plans with their predicted or measured cost, and functions that compare them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from xla_adapters.errors import ConfigError
from xla_adapters.sharding.measure import MeasuringError, PlanCache, PlanCompiler, PlanResult
from xla_adapters.sharding.measure.plan_cache import digest_of_step
from xla_adapters.sharding.mesh import Mesh
from xla_adapters.sharding.plan import ShardingPlan
from xla_adapters.sharding.plan_data import Alternative, CollectiveCost, PlanCost
from xla_adapters.sharding.planner.topology import Topology
from xla_adapters.sharding.tiling import tiles_of_plan

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
        seconds=compute + sum(collective_seconds(item, plan.mesh, topology) for item in result.collectives),
        memory_bytes=result.measurement.memory_bytes,
        fits=result.fits,
    )


def collective_seconds(item: CollectiveCost, mesh: Mesh, topology: Topology) -> float:
    """Time on the slowest axis it uses. Latency per collective is ignored: compilers for real links combine them."""
    axes = [axis for axis in item.axis.split("+") if axis in mesh.axis_names] or list(mesh.axis_names)
    return item.wire_bytes / min(topology.bandwidth_of(axis) for axis in axes)


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
