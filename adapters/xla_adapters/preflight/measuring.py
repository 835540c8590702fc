"""`tpu_compiler`: compiles training steps under several plans for a slice of TPUs, to compare the plans."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from xla_adapters.errors import ConfigError
from xla_adapters.preflight.compiler import CompiledModule, check_compiler, compile_module
from xla_adapters.preflight.job import MakeOptimizer, StepJob, adamw
from xla_adapters.preflight.live_values import memory_of
from xla_adapters.preflight.target import Compiler, Target
from xla_adapters.preflight.trace_process import TracingError, trace_plans_in_process
from xla_adapters.sharding import Measurement, ShardingPlan, read_hlo
from xla_adapters.sharding.measure import MeasuringError, PlanCompiler, PlanResult

# Seconds for each plan to be traced, and for each to be compiled.
TIMEOUT = 900.0
logger = logging.getLogger("xla_adapters")


def tpu_compiler(topology: str, devices: int) -> PlanCompiler:
    """libtpu, for a slice of so many devices.

    Args:
        topology: a slice (`"v5p:2x2x2"`), or a generation, for the usual slice of so many devices.
        devices: number of devices.

    Raises:
        MeasuringError: libtpu is not installed, or does not know the slice.
        ConfigError: the slice has another number of devices.
    """
    target = Target.parse(topology) if ":" in topology else Target.usual(topology, devices)
    if target.devices != devices:
        raise ConfigError(f"topology {target}: it has {target.devices} devices, and the mesh {devices}")
    try:
        Compiler.find()
    except ConfigError as error:
        raise MeasuringError(str(error)) from error
    started = check_compiler(target)
    if started.problem:
        raise MeasuringError(f"topology {target}: {started.compiler} says: {started.problem}")
    return PlanCompiler(
        name=f"{started.compiler} for {target}", measure=functools.partial(measure_for_tpu, target=target)
    )


def measure_for_tpu(
    model: torch.nn.Module,
    batch: Any,
    plans: Sequence[ShardingPlan],
    *,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    target: Target,
    optimizer: MakeOptimizer = adamw,
    timeout: float = TIMEOUT,
) -> list[PlanResult]:
    """Traces the training step under each plan and compiles it with libtpu, without code for it; nothing is run.

    Args:
        model: on any device; its values are not used.
        batch: the global batch.
        plans: for this model, on meshes of as many devices as the slice has.
        around: returns a context for the forward pass.
        target: the slice.
        optimizer: makes the optimizer.
        timeout: seconds for each plan to be traced, and for each to be compiled.

    Returns:
        A result for each plan. A step that the compiler refuses for its memory has what it would need.

    Raises:
        MeasuringError: the model cannot be pickled.
        ConfigError: libtpu is not installed.
    """
    job = StepJob(model=model, batch=batch, plans=tuple(plans), around=around, optimizer=optimizer)
    return list(results_for_tpu(job, target, timeout=timeout))


def results_for_tpu(job: StepJob, target: Target, *, timeout: float = TIMEOUT) -> Iterator[PlanResult]:
    """As `measure_for_tpu`: the result for each of the job's plans as soon as it is known.

    Raises:
        MeasuringError: the model cannot be pickled.
        ConfigError: libtpu is not installed.
    """
    try:
        traced = trace_plans_in_process(job, timeout=timeout * len(job.plans))
    except TracingError as error:
        raise MeasuringError(str(error)) from error
    known: dict[str, PlanResult] = {}
    for plan, step in zip(job.plans, traced, strict=True):
        if isinstance(step, str):
            yield PlanResult(problem=step)
            continue
        digest = hashlib.sha256(step.module).hexdigest()
        if digest not in known:
            compiled = compile_module(step.module, target, timeout=timeout, generate_code=False)
            known[digest] = result_of(compiled, plan, seconds=step.seconds)
            logger.info("sharding: %s on %s: compiled for %s in %.0f s", plan.name, plan.mesh, target, compiled.seconds)
        yield known[digest]


def result_of(compiled: CompiledModule, plan: ShardingPlan, *, seconds: float) -> PlanResult:
    """The result for a plan.

    Args:
        compiled: its step.
        plan: the plan.
        seconds: time of tracing.
    """
    if compiled.memory is None and not (compiled.out_of_memory and compiled.text):
        return PlanResult(problem=compiled.problem.partition("\n")[0] or "it was not compiled")
    # The compiler optimises a program before it refuses it.
    stats = compiled.collectives or read_hlo(compiled.text, compiled.target.devices)
    needed = compiled.memory.needed if compiled.memory is not None else sum(memory_of(compiled.buffers))
    return PlanResult(
        measurement=Measurement(wire_bytes=stats.wire_bytes, memory_bytes=needed, collectives=stats.counts),
        collectives=stats.costs(plan.mesh),
        fits=compiled.memory is not None and needed <= compiled.hbm_bytes,
        seconds=seconds + compiled.seconds,
    )
