"""Pre-flights: the steps of a training are traced without memory, compiled for a slice of TPUs, and reported on."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import math
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils import _pytree

from xla_adapters.errors import ConfigError, UnsupportedOptionError
from xla_adapters.hlo.cost import cost_of
from xla_adapters.runtime import get_runtime, runtime_name
from xla_adapters.sharding import (
    Around,
    Measurement,
    Mesh,
    Scheme,
    ShardingConfig,
    ShardingPlan,
    checkpoint_activations,
    make_plan,
    read_hlo,
)
from xla_adapters.sharding.measure import MeasuringError, PlanCompiler, PlanResult, pack
from xla_adapters.sharding.planner import Topology, collective_seconds
from xla_adapters.tools.preflight_report import Attempt, Estimate, PreflightReport, SavedPrograms, StepReport, StepTime
from xla_adapters.tools.save_programs import check_saving, save_programs
from xla_adapters.tools.step_capture import TracedStep
from xla_adapters.tools.tpu_compiler import (
    CompiledModule,
    Compiler,
    Target,
    check_compiler,
    compile_module,
    largest_values,
)
from xla_adapters.tools.trace_process import (
    OPTIMIZERS,
    MakeOptimizer,
    OneStep,
    Request,
    Run,
    Traced,
    Training,
    adamw,
    trace_in_process,
)
from xla_adapters.utils.torch_modes import device_type

Dtype = Literal["float32", "bfloat16", "bf16-mixed"]
# Loads a model on the meta device, for a batch of so many samples of such a length: model, batch, context.
Load = Callable[[int, int | None], tuple[torch.nn.Module, Any, Around]]
# Seconds for tracing, and for each compile.
TIMEOUT = 900.0
Folder = str | os.PathLike[str]

_NO_SHARDING = (
    "sharding: with TorchTPU each process has one device, and a pre-flight traces one process, without what ranks "
    "exchange; leave it out"
)
_ALONE = (
    "the program is that of one process, as with sharding='dp' but without the exchange of gradients: a pre-flight "
    "with TorchTPU does not trace what several ranks exchange"
)
logger = logging.getLogger("xla_adapters")


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


# ---- scripts, and trainings that a program has set up -----------------------------------------------


def preflight_script(
    command: Sequence[str],
    target: Target,
    *,
    sharding: str | None = None,
    timeout: float = TIMEOUT,
    shows_output: bool = False,
    saves_to: Folder | None = None,
) -> PreflightReport:
    """Says whether the steps of a script compile for a slice of TPUs, fit their memory, and what bounds them.

    The script runs in a process of its own, on placeholders without memory, until it has traced one update of its
    training and one step of its evaluation. Its model is made on the host, as the script makes it.

    Args:
        command: the script and its arguments; or `-m`, a module and its arguments.
        target: the slice.
        sharding: for trainers that do not shard by themselves: the name of a plan.
        timeout: seconds for tracing, and for each compile.
        shows_output: whether what the script prints is shown.
        saves_to: the folder in which the programs of a run are saved; the script runs once more for that.

    Raises:
        ConfigError: libtpu does not know the slice, or what traces with TorchTPU is not installed; or programs cannot
            be saved there.
        UnsupportedOptionError: the runtime is TorchTPU, and a sharding, or to save programs, is asked for; or to save
            those of several hosts.
    """
    if sharding is not None and not can_shard():
        raise UnsupportedOptionError(_NO_SHARDING)
    if sharding is not None and saves_to is not None:
        raise ConfigError(
            "--save-programs: a run of this script would not be sharded by --sharding: give its trainer sharding="
        )
    request = Request(generation=target.generation, command=command, sharding=sharding)
    return _preflight(
        shlex.join(command), target, request, timeout=timeout, shows_output=shows_output, saves_to=saves_to
    )


def preflight_run(
    what: str,
    topology: str,
    model: torch.nn.Module,
    samples: Any,
    run: Run,
    *,
    sharded: bool,
    timeout: float,
    saves_to: Folder | None = None,
) -> PreflightReport:
    """The pre-flight of a training that a program has set up and not begun.

    Args:
        what: is trained, in words.
        topology: the slice.
        model: on any device; the values of its parameters are not used.
        samples: what the loops are fed with, on the host.
        run: called in the tracing process, for which it is pickled; runs the training.
        sharded: whether the training is sharded.
        timeout: seconds for tracing, and for each compile.
        saves_to: the folder in which its programs are saved.

    Raises:
        ConfigError: there is no such slice, or what traces with TorchTPU is not installed; or programs cannot be saved.
        UnsupportedOptionError: programs are to be saved of TorchTPU, or of several hosts.
    """
    target, training = Target.parse(topology), Training(model=model, batch=samples, runs=(run,))
    try:
        request = Request(generation=target.generation, training=pack(training), spmd=sharded)
    except MeasuringError as error:
        return PreflightReport(what=what, topology=str(target), problem=str(error))
    return _preflight(what, target, request, timeout=timeout, saves_to=saves_to)


def _preflight(
    what: str,
    target: Target,
    request: Request,
    *,
    timeout: float,
    shows_output: bool = False,
    saves_to: Folder | None = None,
) -> PreflightReport:
    if not can_shard() and get_runtime().device.launched() > 1:
        raise UnsupportedOptionError(
            f"preflight in one of {get_runtime().device.launched()} processes: with TorchTPU a pre-flight traces one "
            "process, without what ranks exchange; start the script without torchrun or xla-adapters launch"
        )
    folder = None if saves_to is None else check_saving(target, saves_to)
    missing = _missing_compiler(target)
    # A trainer that does not shard refuses several devices; what is said of the slice is more to the point.
    devices = 1 if request.training is not None and not request.spmd else target.devices
    (traced,) = trace_in_process(request, devices, timeout=timeout, shows_output=shows_output)
    report = report_traced(what, target, traced, timeout=timeout, missing=missing)
    if folder is None:
        return report
    if report.problem:
        return dataclasses.replace(report, programs=SavedPrograms(folder=str(folder), problem="see above"))
    saved = save_programs(request, target, folder, timeout=timeout, shows_output=shows_output)
    return dataclasses.replace(report, programs=saved)


def _missing_compiler(target: Target) -> str:
    """Why nothing can be compiled: libtpu is not installed.

    Raises:
        ConfigError: libtpu does not know the slice.
    """
    try:
        Compiler.find()
    except ConfigError as error:
        return str(error)
    check_target(target)
    return ""


def report_traced(what: str, target: Target, traced: Traced, *, timeout: float, missing: str = "") -> PreflightReport:
    """Compiles the graphs of a run, and reports.

    Args:
        what: was traced, in words.
        target: the slice.
        traced: the graphs.
        timeout: seconds for each compile.
        missing: why nothing can be compiled; empty if it can.
    """
    unsharded = _unsharded(traced, target)
    report = PreflightReport(
        what=what,
        topology=str(target),
        problem=traced.problem or unsharded,
        notes=(
            *traced.changed,
            *(f"not saved: {text}" for text in traced.skipped),
            *([_ALONE] if target.devices > 1 and not can_shard() else []),
        ),
        hbm_bytes=int(Topology.preset(target.generation).memory_bytes),
    )
    if traced.invalid or unsharded or not traced.steps:
        return report
    if missing:
        return dataclasses.replace(report, problem=missing, estimates=_estimates(traced, target))
    mesh = traced.plan.mesh if traced.plan is not None else Mesh.data_and_model(1, 1)
    where = "" if target.devices == 1 else f", on one of {target.devices} devices"
    if traced.plan is not None:
        where = f", sharding {traced.plan.name} on {mesh}"
    graphs = [
        report_on(
            f"{step.kind}{where}", step, compile_module(step.module, target, form=step.form, timeout=timeout), mesh
        )
        for step in traced.steps
    ]
    return dataclasses.replace(report, graphs=tuple(graphs))


def _estimates(traced: Traced, target: Target) -> tuple[Estimate, ...]:
    found = []
    peak = Topology.preset(target.generation).flops
    for step in traced.steps:
        # Counted in an HLO module only.
        flops = cost_of(step.module).flops if step.form == "hlo" else None
        share = None if flops is None else flops / target.devices
        seconds = None if share is None else share / peak
        found.append(Estimate(step=step.kind, argument_bytes=step.argument_bytes, flops=share, seconds=seconds))
    return tuple(found)


def _unsharded(traced: Traced, target: Target) -> str:
    if traced.plan is not None or target.devices == 1 or not traced.steps or not can_shard():
        return ""
    return (
        f"the training is not sharded and uses one device, and {target} has {target.devices}: shard it (sharding= or "
        "auto_sharding= of the trainer or strategy, or --sharding), or name a slice of one device, as v5e:1x1"
    )


def report_on(step: str, traced: TracedStep, compiled: CompiledModule, mesh: Mesh) -> StepReport:
    """The report on a compiled step.

    Args:
        step: what was compiled, in one line.
        traced: the step.
        compiled: what libtpu made of it.
        mesh: over which it is sharded.
    """
    topology = Topology.preset(compiled.target.generation)
    report = StepReport(
        step=step,
        batch=traced.batch,
        topology=str(compiled.target),
        device=compiled.kind,
        compiler=compiled.compiler,
        hbm_bytes=compiled.hbm_bytes or int(topology.memory_bytes),
        problem=compiled.problem,
        out_of_memory=compiled.out_of_memory,
        memory=compiled.memory,
        needed_bytes=compiled.needed_bytes,
        largest=tuple(largest_values(compiled.text, compiled.buffers, traced.names)) if compiled.text else (),
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


# ---- a model without a script -----------------------------------------------------------------------


@dataclass(frozen=True)
class InBfloat16:
    """A context for the forward pass with autocast to bfloat16, as `bf16=True` of a Trainer.

    Args:
        around: returns a further context.
    """

    around: Callable[[], AbstractContextManager[Any]]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """The context."""
        with self.around(), torch.autocast(device_type(), dtype=torch.bfloat16):
            yield


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
        if self.mesh is not None and isinstance(self.sharding, ShardingPlan):
            raise ConfigError("the plan has its mesh: leave out the mesh, or the plan")

    def describe(self, model: torch.nn.Module, plan: ShardingPlan) -> str:
        """The step in one line."""
        batch = f"{self.rows}" + ("" if self.length is None else f"x{self.length}")
        sharding = f"sharding {plan.name} on {plan.mesh}" if can_shard() else "one device"
        parts = [f"{self.name} ({type(model).__name__})", f"batch {batch}", sharding, self.optimizer, self.dtype]
        return ", ".join([*parts, *(["gradient checkpointing"] if self.gradient_checkpointing else [])])


def preflight_model(
    load: Load, options: StepOptions, target: Target, *, timeout: float = TIMEOUT, alternatives: bool = True
) -> PreflightReport:
    """As `preflight_script`, of one training step of a model that computes its loss.

    Args:
        load: makes the model on the meta device, and a batch.
        options: of the step.
        target: the slice.
        timeout: seconds for tracing, and for each compile.
        alternatives: whether variants are compiled if the step does not fit, until one does.

    Raises:
        ConfigError: libtpu does not know the slice, or an option cannot work.
        UnsupportedOptionError: the runtime is TorchTPU, and a sharding is asked for.
    """
    if (options.sharding != "auto" or options.mesh is not None) and not can_shard():
        raise UnsupportedOptionError(_NO_SHARDING)
    try:
        report = _preflight_model(load, options, target, timeout)
    except ConfigError as error:
        if options.sharding != "auto":
            raise
        # By the planner's estimate no plan fits. Of the one that keeps least on each device the compiler says why.
        options = dataclasses.replace(options, sharding="fsdp", mesh=None)
        report = _preflight_model(load, options, target, timeout)
        report = dataclasses.replace(report, notes=(*report.notes, f"sharding fsdp, since auto has no plan: {error}"))
    if not alternatives or not any(graph.out_of_memory for graph in report.graphs):
        return report
    return dataclasses.replace(report, attempts=tuple(_attempts(load, options, target, timeout)))


def _preflight_model(load: Load, options: StepOptions, target: Target, timeout: float) -> PreflightReport:
    model, batch, around = load(options.rows, options.length)
    if options.dtype != "bf16-mixed":
        model.to(getattr(torch, options.dtype))
    if options.gradient_checkpointing:
        checkpoint_activations(model)
    plan = _plan(model, batch, around, options, target)
    step = OneStep(
        plan=plan,
        around=InBfloat16(around) if options.dtype == "bf16-mixed" else around,
        optimizer=OPTIMIZERS[options.optimizer],
    )
    return preflight_run(
        options.describe(model, plan), str(target), model, batch, step, sharded=can_shard(), timeout=timeout
    )


def _attempts(load: Load, options: StepOptions, target: Target, timeout: float) -> Iterator[Attempt]:
    """Compiles variants until one fits, each with the changes before it that are possible."""
    for change, values in _changes(options):
        variant = dataclasses.replace(options, **values)
        try:
            found = _preflight_model(load, variant, target, timeout)
        except ConfigError as error:
            # The model has no gradient checkpointing, or the batch does not divide.
            yield Attempt(change=change, fits=None, problem=str(error))
            continue
        options = variant
        problem = found.problem or next((graph.problem for graph in found.graphs), "")
        yield Attempt(change=change, fits=found.fits, needed_bytes=found.needed_bytes, problem=problem)
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


# ---- plans, to be compared --------------------------------------------------------------------------


def plan_compiler(topology: str, devices: int) -> PlanCompiler:
    """libtpu as what compiles the steps of plans (`ShardingConfig.measure_top_k`), for a slice of so many devices.

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
        name=f"{started.compiler} for {target}",
        measure=lambda *args, **options: list(measure_for_tpu(*args, target=target, **options)),
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
) -> Iterator[PlanResult]:
    """Traces the training step under each plan and compiles it with libtpu, without code for it; nothing is run.

    Args:
        model: on any device; its values are not used.
        batch: the global batch.
        plans: for this model, on meshes of as many devices as the slice has.
        around: returns a context for the forward pass.
        target: the slice.
        optimizer: makes the optimizer.
        timeout: seconds for each plan to be traced, and for each to be compiled.

    Yields:
        A result for each plan as soon as it is known. A step that the compiler refuses for its memory has what it would
        need.

    Raises:
        MeasuringError: the model cannot be pickled.
        ConfigError: libtpu is not installed.
    """
    shapes = _pytree.tree_map_only(torch.Tensor, functools.partial(torch.empty_like, device="meta"), batch)
    runs = tuple(OneStep(plan=plan, around=around, optimizer=optimizer) for plan in plans)
    training = pack(Training(model=model, batch=shapes, runs=runs))
    request = Request(generation=target.generation, training=training, count=len(runs), spmd=True)
    known: dict[str, PlanResult] = {}
    for plan, traced in zip(plans, trace_in_process(request, target.devices, timeout=timeout * len(runs)), strict=True):
        if not traced.steps:
            yield PlanResult(problem=traced.problem)
            continue
        (step,) = traced.steps
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
    needed = compiled.needed_bytes
    return PlanResult(
        measurement=Measurement(wire_bytes=stats.wire_bytes, memory_bytes=needed, collectives=stats.counts),
        collectives=stats.costs(plan.mesh),
        fits=compiled.memory is not None and needed <= compiled.hbm_bytes,
        seconds=seconds + compiled.seconds,
    )
