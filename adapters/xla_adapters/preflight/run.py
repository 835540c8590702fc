"""`preflight`: traces a training step without memory, compiles it for a slice of TPUs, and reports."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from xla_adapters.errors import ConfigError, UnsupportedOptionError
from xla_adapters.preflight.compiler import CompiledModule, check_compiler, compile_module
from xla_adapters.preflight.job import OPTIMIZERS, InBfloat16, StepJob
from xla_adapters.preflight.live_values import largest_values, memory_of
from xla_adapters.preflight.report import Attempt, PreflightReport, StepTime
from xla_adapters.preflight.target import Target
from xla_adapters.preflight.trace_process import TracingError, trace_in_process
from xla_adapters.preflight.traced_step import TracedStep
from xla_adapters.runtime import runtime_name
from xla_adapters.sharding import Around, Mesh, Scheme, ShardingConfig, ShardingPlan, checkpoint_activations, make_plan
from xla_adapters.sharding.planner import Topology, collective_seconds

Dtype = Literal["float32", "bfloat16", "bf16-mixed"]
NO_SHARDING = (
    "sharding: with TorchTPU each process has one device, and this package shards with torch_xla only; leave it out"
)
# Loads a model on the meta device, for a batch of so many samples of such a length: model, batch, context.
Load = Callable[[int, int | None], tuple[torch.nn.Module, Any, Around]]


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """A training step.

    Args:
        name: of the model, for the report.
        rows: samples in a batch, of all devices.
        length: of a sample; None if the model does not ask for it.
        sharding: `"auto"` plans, the others are templates; or a plan that was made for the model.
        mesh: devices along the data and the model axis; None to choose.
        optimizer: `"adamw"`, `"adam"` or `"sgd"` (with momentum).
        dtype: of the parameters; `"bf16-mixed"` keeps them in float32, and the forward runs under bfloat16 autocast, as
            with `bf16=True` of a Trainer.
        gradient_checkpointing: whether one activation per layer is kept, and the others are computed again.

    Raises:
        ConfigError: a value is not valid.
    """

    name: str
    rows: int
    length: int | None = None
    sharding: Scheme | ShardingPlan = "auto"
    mesh: tuple[int, ...] | None = None
    optimizer: str = "adamw"
    dtype: Dtype = "float32"
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("optimizer", self.optimizer, tuple(OPTIMIZERS)),
            ("dtype", self.dtype, get_args(Dtype)),
        ):
            if value not in choices:
                raise ConfigError(f"{name}={value!r} is not a valid value; valid values: {', '.join(choices)}")
        if self.mesh is not None and isinstance(self.sharding, ShardingPlan):
            raise ConfigError("the plan has its mesh: leave out the mesh, or the plan")

    def describe(self, plan: ShardingPlan | None) -> str:
        """The step in one line."""
        batch = f"{self.rows}" + ("" if self.length is None else f"x{self.length}")
        sharding = f"sharding {self.sharding if plan is None else f'{plan.name} on {plan.mesh}'}"
        parts = [self.name, f"batch {batch}", sharding if can_shard() else "one device", self.optimizer, self.dtype]
        return ", ".join([*parts, *(["gradient checkpointing"] if self.gradient_checkpointing else [])])


def preflight(
    load: Load, options: StepOptions, target: Target, *, timeout: float = 900, alternatives: bool = True
) -> PreflightReport:
    """Says whether a training step compiles for a slice of TPUs, fits their memory, and what bounds it.

    The step is traced and compiled in processes of their own, without memory for parameters, and nothing is run.

    Args:
        load: makes the model on the meta device, and a batch.
        options: of the step.
        target: the slice.
        timeout: seconds for tracing, and for compiling.
        alternatives: whether variants are compiled if the step does not fit, until one does.

    Raises:
        ConfigError: libtpu is not installed or does not know the slice, or an option cannot work.
        UnsupportedOptionError: the runtime is TorchTPU, and a sharding is asked for.
    """
    if (options.sharding != "auto" or options.mesh is not None) and not can_shard():
        raise UnsupportedOptionError(NO_SHARDING)
    check_target(target)
    report = _compiled(load, options, target, timeout)
    if report.fits or not alternatives or not report.out_of_memory:
        return report
    return dataclasses.replace(report, attempts=tuple(_attempts(load, options, target, timeout)))


def can_shard() -> bool:
    """Whether a step can be cut over several devices, on the runtime in use.

    Raises:
        ConfigError: no runtime is installed.
    """
    return runtime_name() != "torch_tpu"


def check_target(target: Target) -> None:
    """Raises if the installed libtpu does not know a slice.

    Raises:
        ConfigError: says what libtpu says; or libtpu is not installed.
    """
    started = check_compiler(target)
    if started.problem:
        raise ConfigError(
            f"topology {target}: {started.compiler} says: {started.problem}; usual slices: {target.usual_slices}"
        )
    if started.devices != target.devices:
        raise ConfigError(f"topology {target}: {started.compiler} sees {started.devices} devices, not {target.devices}")


def _attempts(load: Load, options: StepOptions, target: Target, timeout: float) -> Iterator[Attempt]:
    """Compiles variants until one fits, each with the changes before it that are possible."""
    for change, values in _changes(options):
        variant = dataclasses.replace(options, **values)
        try:
            found = _compiled(load, variant, target, timeout)
        except ConfigError as error:
            # The model has no gradient checkpointing, or the batch does not divide.
            yield Attempt(change=change, fits=False, problem=str(error))
            continue
        options = variant
        yield Attempt(change=change, fits=found.fits, needed_bytes=found.needed_bytes, problem=found.problem)
        if found.fits:
            return


def _changes(options: StepOptions) -> Iterator[tuple[str, dict[str, Any]]]:
    """Changes by which a step needs less memory, in words and as options: what costs least comes first."""
    if options.sharding != "fsdp" and can_shard():
        yield "sharding fsdp (same results, other collectives)", {"sharding": "fsdp", "mesh": None}
    if not options.gradient_checkpointing:
        yield "gradient checkpointing (same results, a second forward)", {"gradient_checkpointing": True}
    if options.dtype == "float32":
        yield "bf16-mixed (activations in bfloat16)", {"dtype": "bf16-mixed"}
    for share in (2, 4, 8):
        if options.rows % share == 0:
            rows = options.rows // share
            yield f"batch of {rows} samples ({share} accumulated for the same update)", {"rows": rows}


def _compiled(load: Load, options: StepOptions, target: Target, timeout: float) -> PreflightReport:
    model, batch, around = load(options.rows, options.length)
    if options.dtype != "bf16-mixed":
        model.to(getattr(torch, options.dtype))
    if options.gradient_checkpointing:
        checkpoint_activations(model)
    plan = _plan(model, batch, around, options, target)
    mixed = InBfloat16(around) if options.dtype == "bf16-mixed" else around
    job = StepJob(model=model, batch=batch, plans=(plan,), around=mixed, optimizer=OPTIMIZERS[options.optimizer])
    step = dataclasses.replace(options, name=f"{options.name} ({type(model).__name__})").describe(plan)
    try:
        traced = trace_in_process(job, timeout=timeout)
    except TracingError as error:
        return PreflightReport(step=step, topology=str(target), problem=f"it cannot be traced: {error}")
    return report_of(step, traced, compile_module(traced.module, target, form=traced.form, timeout=timeout), plan)


def _plan(model: torch.nn.Module, batch: Any, around: Around, options: StepOptions, target: Target) -> ShardingPlan:
    if not can_shard():
        return make_plan(model, ShardingConfig(scheme="dp"), 1, example=lambda: batch, around=around)
    if isinstance(options.sharding, ShardingPlan):
        config = ShardingConfig(plan=options.sharding)
    else:
        automatic = options.sharding == "auto"
        config = ShardingConfig(
            scheme=options.sharding,
            mesh_shape=options.mesh,
            topology=target.generation if automatic else None,
            # Planning needs no device.
            measure_top_k=0 if automatic else None,
        )
    plan = make_plan(model, config, target.devices, example=lambda: batch, around=around)
    parts = math.prod(plan.mesh.axis_size(axis) for axis in plan.batch)
    if options.rows % parts:
        raise ConfigError(
            f"a batch of {options.rows} samples does not divide into {parts} parts ({plan.mesh}): give a multiple of "
            f"{parts}"
        )
    return plan


def report_of(step: str, traced: TracedStep, compiled: CompiledModule, plan: ShardingPlan) -> PreflightReport:
    """The report on a compiled step.

    Args:
        step: what was compiled, in one line.
        traced: the step.
        compiled: what libtpu made of it.
        plan: how it is sharded.
    """
    return report_on(step, traced, compiled, plan.mesh)


def report_on(step: str, traced: TracedStep, compiled: CompiledModule, mesh: Mesh) -> PreflightReport:
    """As `report_of`, given the mesh."""
    topology = Topology.preset(compiled.target.generation)
    largest = largest_values(compiled.text, compiled.buffers, traced.names) if compiled.text else []
    report = PreflightReport(
        step=step,
        batch=traced.batch,
        topology=str(compiled.target),
        device=compiled.kind,
        compiler=compiled.compiler,
        hbm_bytes=compiled.hbm_bytes or int(topology.memory_bytes),
        problem=compiled.problem,
        out_of_memory=compiled.out_of_memory,
        memory=compiled.memory,
        needed_bytes=compiled.memory.needed if compiled.memory is not None else sum(memory_of(compiled.buffers)),
        largest=tuple(largest),
        trace_seconds=traced.seconds,
        compile_seconds=compiled.seconds,
    )
    if compiled.collectives is None:
        return report
    costs = [
        dataclasses.replace(item, seconds=collective_seconds([item], topology))
        for item in compiled.collectives.costs(mesh)
    ]
    return dataclasses.replace(
        report,
        flops=compiled.flops,
        bytes_accessed=compiled.bytes_accessed,
        collectives=tuple(costs),
        time=StepTime(
            compute=compiled.flops / topology.flops,
            memory=compiled.bytes_accessed / topology.memory_bandwidth,
            interconnect=sum(item.seconds for item in costs),
        ),
    )
