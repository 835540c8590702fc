"""`measure_plans`: compiles training steps under plans in a separate process, and reads XLA's dump of the programs.

It must be another process, because XLA reads its flags (`--xla_dump_to`) once. That process has as many virtual CPU
devices as the mesh. It gets a `Job`, a model without weights and plans for it, and returns a `PlanResult` for each.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import pkgutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch.utils import _pytree

from xla_adapters.errors import MODEL_FAILURES, XLAAdapterError
from xla_adapters.runtime import eager, get_runtime
from xla_adapters.runtime.transfers import to_host_in_one_transfer, uploading
from xla_adapters.sharding.communication_volume import read_hlo
from xla_adapters.sharding.hlo_text import read_memory_report
from xla_adapters.sharding.placement import Placement
from xla_adapters.sharding.plan import ShardingPlan
from xla_adapters.sharding.plan_data import CollectiveCost, Measurement
from xla_adapters.tracing.optimizers import prime
from xla_adapters.tracing.step_scope import StepScope
from xla_adapters.utils.child_process import Asked, ask, python_path


class MeasuringError(Exception):
    """Plans could not be compiled to be measured; they are compared by their predictions."""


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """The result for one plan.

    Attributes:
        measurement: of its compiled step; None if it could not be compiled.
        collectives: by kind and mesh axis, without times.
        fits: False if the compiler refused the step because a device's memory is too small for it.
        seconds: time of tracing and compiling.
        problem: why there is no measurement.
    """

    measurement: Measurement | None = None
    collectives: tuple[CollectiveCost, ...] = ()
    fits: bool = True
    seconds: float = 0.0
    problem: str = ""

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> PlanResult:
        """Reads what `dataclasses.asdict` returned."""
        measurement = values["measurement"]
        read = {
            "measurement": None if measurement is None else Measurement(**measurement),
            "collectives": tuple(CollectiveCost(**item) for item in values["collectives"]),
        }
        return cls(**{**values, **read})


# Elements; larger buffers are sent as zeros, since control flow does not depend on them.
_LARGEST_BUFFER = 2**20


@dataclass(frozen=True, kw_only=True)
class Job:
    """The input of the measuring process.

    Attributes:
        model: its parameters are on the meta device.
        batch: keyword or positional arguments of `forward`, zeros on the host.
        plans: to compile steps for.
        around: returns a context for the forward pass, as in the training.
    """

    model: torch.nn.Module
    batch: Any
    plans: Sequence[ShardingPlan]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def pack(job: Any) -> bytes:
    """Pickles what has a `model`, without the values of parameters; it is not changed.

    Raises:
        MeasuringError: something in the model cannot be pickled.
    """
    buffers = list(job.model.buffers())
    hosts = dict(zip(map(id, buffers), to_host_in_one_transfer(buffers), strict=True))

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, torch.nn.Parameter):
                return _parameter, (tuple(value.shape), value.dtype, value.requires_grad, dict(value.__dict__))
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                host = hosts.get(id(value))
                if value.numel() > _LARGEST_BUFFER or (host is None and value.device.type != "cpu"):
                    return functools.partial(torch.zeros, dtype=value.dtype), (tuple(value.shape),)
                if host is not None and value.device.type != "cpu":
                    return _same, (host.detach(),)
            return super().reducer_override(value)

    stream = io.BytesIO()
    classes = {str(type(module)) for module in job.model.modules()}
    recorded = {name: outputs for name, outputs in _recorded().items() if name in classes}
    try:
        Pickler(stream).dump((job, recorded))
    except (TypeError, AttributeError, RuntimeError, ValueError, NotImplementedError, OSError) as error:
        # Pickling a user's model may raise any of these.
        raise MeasuringError(f"the model cannot be pickled for another process: {error}") from error
    return stream.getvalue()


def unpack(data: bytes, device: str = "meta") -> Any:
    """Reads what `pack` returned.

    Args:
        data: that.
        device: of parameters; zeros, if it has memory.
    """
    _parameters_on.append(device)
    try:
        job, recorded = cloudpickle.loads(data)
    finally:
        _parameters_on.pop()
    dict.update(_recorded(), recorded)
    return job


def _recorded() -> dict[str, Any]:
    """What models of transformers return beside their outputs, by class: noted when a model is made, not unpickled."""
    found: dict[str, Any] = getattr(sys.modules.get(_RECORDED), "_CAN_RECORD_REGISTRY", {})
    return found


_RECORDED = "transformers.utils.output_capturing"
# Of parameters that are being unpickled, the last one.
_parameters_on: list[str] = ["meta"]


def _parameter(
    shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, more: dict[str, Any]
) -> torch.nn.Parameter:
    zeros = torch.zeros(shape, dtype=dtype, device=_parameters_on[-1])
    value = torch.nn.Parameter(zeros, requires_grad=requires_grad)
    value.__dict__.update(more)
    return value


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


_HLO, _BUFFERS = ".cpu_after_optimizations.txt", "-buffer-assignment.txt"


def compiled_step(job: Job, plan: ShardingPlan, folder: Path, known: dict[bytes, PlanResult]) -> PlanResult:
    """Compiles forward, loss, backward and AdamW, and reads collectives and memory of the compiled program.

    Args:
        job: the model and the batch; the parameters are moved to the devices, as zeros.
        plan: how they are sharded.
        folder: where XLA dumps its programs as text (`--xla_dump_to`); emptied afterwards.
        known: earlier results by hash of the graph; the new one is added. Plans with equal graphs share a result, since
            a graph is compiled only once per process.
    """
    begun = time.monotonic()
    graph = _compile(job, plan)
    if graph in known:
        return known[graph]
    # Uploads may have compiled small programs; the step is the largest.
    program = max(folder.glob(f"*{_HLO}"), key=lambda path: path.stat().st_size)
    stats = read_hlo(program.read_text(), plan.mesh.size)
    report = program.with_name(program.name.removesuffix(".txt") + _BUFFERS)
    result = PlanResult(
        measurement=stats.measurement(read_memory_report(report.read_text())),
        collectives=stats.costs(plan.mesh),
        seconds=time.monotonic() - begun,
    )
    for path in folder.iterdir():
        path.unlink()
    known[graph] = result
    return result


def _compile(job: Job, plan: ShardingPlan) -> bytes:
    runtime, model = get_runtime(), job.model
    placement = Placement(plan, runtime)
    with eager(True):
        with uploading():
            _fill(model)
            placement.move_model(model)
            batch = _pytree.tree_map(_to_device, job.batch)
        runtime.tracing.flush()
        placement.place_batch(batch)
        optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad])
        prime(optimizer)
        state = [value for entry in optimizer.state.values() for value in entry.values()]
        held = [value for value in (*model.parameters(), *state) if runtime.device.owns(value)]
        before = [runtime.values.second_copy(runtime.values.snapshot(value)) for value in held]
        with placement.constraining(model):
            scope = StepScope(name="measured step")
            scope.open()
            try:
                with job.around():
                    loss = loss_of(model(**batch) if isinstance(batch, dict) else model(*batch))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                pending = [value for value in runtime.tracing.live_tensors() if runtime.tracing.is_pending(value)]
                # In the order in which a sync takes them, so that the program is reproducible.
                pending.sort(key=runtime.lazy.tensor_number)
                runtime.tracing.set_execution_allowed(True)
                return runtime.executables.compile(pending, before)
            finally:
                scope.abort()


def _fill(model: torch.nn.Module) -> None:
    """Replaces parameters on the meta device by zeros; tied weights stay tied."""
    filled: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for key, value in module._parameters.items():
            if value is not None:
                if id(value) not in filled:
                    zeros = torch.zeros(value.shape, dtype=value.dtype)
                    filled[id(value)] = torch.nn.Parameter(zeros, value.requires_grad)
                module._parameters[key] = filled[id(value)]


def _to_device(value: Any) -> Any:
    return value.to(get_runtime().device.torch_device()) if isinstance(value, torch.Tensor) else value


def loss_of(output: Any) -> torch.Tensor:
    """The `loss` of a model's output; without one, the sum of the means of all outputs."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    leaves = _pytree.tree_leaves(dict(output) if isinstance(output, dict) else output)
    means = [leaf.float().mean() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return torch.stack(means).sum()


# The machine code is never run, so it need not be optimised.
_FLAGS = "--xla_dump_hlo_as_text --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def measure_plans(
    model: torch.nn.Module,
    batch: Any,
    plans: Sequence[ShardingPlan],
    *,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    timeout: float = 900,
) -> list[PlanResult]:
    """Compiles the training step under each plan; nothing is executed, and the model is not touched.

    Args:
        model: on any device; its values are not used.
        batch: the global batch: keyword arguments of `forward`, or positional ones.
        plans: for this model, on meshes of one size.
        around: returns a context for the forward pass; the other process must be able to import it.
        timeout: seconds for all plans together; the results of plans that were not reached have a `problem`.

    Returns:
        A result for each plan.

    Raises:
        MeasuringError: the model cannot be pickled, or the process failed before the first result.
    """
    zeros = _pytree.tree_map_only(torch.Tensor, lambda leaf: torch.zeros(leaf.shape, dtype=leaf.dtype), batch)
    data = pack(Job(model=model, batch=zeros, plans=tuple(plans), around=around))
    with tempfile.TemporaryDirectory(prefix="xla-adapters-") as folder:
        ended = ask(
            answer_job,
            pickle.dumps((folder, data)),
            environment={
                **{name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "PT_XLA"))},
                "PJRT_DEVICE": "CPU",
                "CPU_NUM_DEVICES": str(plans[0].mesh.size),
                "XLA_FLAGS": f"--xla_dump_to={folder} {_FLAGS}",
                "PYTHONPATH": python_path(),
                "TF_CPP_MIN_LOG_LEVEL": "3",
            },
            timeout=timeout,
        )
    if not ended.answers:
        raise MeasuringError(f"the process that measures {ended}")
    missing = PlanResult(problem=f"not reached: the process that measures {ended.how}")
    return [*map(pickle.loads, ended.answers), *[missing] * (len(plans) - len(ended.answers))]


def answer_job(asked: Asked) -> None:
    """What the other process does: it gets a folder for dumps and a `Job`, and answers with a result for each plan."""
    folder, data = pickle.loads(asked.request)
    get_runtime().device.initialize(spmd=True)
    known: dict[bytes, PlanResult] = {}
    for plan in unpack(data).plans:
        try:
            result = compiled_step(unpack(data), plan, Path(folder), known)
        except (*MODEL_FAILURES, XLAAdapterError) as error:
            # The other plans are still measured.
            traceback.print_exc()
            result = PlanResult(problem=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        asked.answer(pickle.dumps(result))


# Compiles the step of a model under each plan, in another process: `measure_plans`, with its model, batch, plans and
# (by name) `around`.
Measure = Callable[..., list[PlanResult]]


@dataclass(frozen=True, kw_only=True)
class PlanCompiler:
    """A compiler and what it compiles for.

    Attributes:
        name: of the compiler and its target; measurements are stored under it.
        measure: compiles the steps.
    """

    name: str
    measure: Measure


Find = Callable[[str, int], PlanCompiler]


def _find_for_tpus(topology: str, devices: int) -> PlanCompiler:
    # By its name: it stands above this package, and few trainings need it.
    find: Find = pkgutil.resolve_name("xla_adapters.tools.preflight:plan_compiler")
    return find(topology, devices)


_registered: list[Find] = [_find_for_tpus]


def register(find: Find) -> None:
    """Sets what `compiler_for` calls for devices that are no CPUs, for the rest of the process."""
    _registered[:] = [find]


def compiler_for(topology: str, devices: int) -> PlanCompiler:
    """The compiler for so many devices.

    Args:
        topology: as in `ShardingConfig`.
        devices: number of devices.

    Raises:
        MeasuringError: there is none; the message says what is missing.
        ConfigError: the topology is not one of so many devices.
    """
    if topology == "cpu":
        return PlanCompiler(name="cpu", measure=measure_plans)
    if not _registered:
        raise MeasuringError("plans are compiled for CPU devices only")
    return _registered[0](topology, devices)
