"""`compiled_step`: compiles the training step of a model under a plan, without executing it, and reads the program."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree

from xla_adapters.runtime import get_runtime
from xla_adapters.runtime.modes import eager
from xla_adapters.runtime.transfers import uploading
from xla_adapters.sharding.hlo import read_hlo, read_memory_report
from xla_adapters.sharding.measure.job import Job
from xla_adapters.sharding.measure.results import PlanResult
from xla_adapters.sharding.placement import Placement
from xla_adapters.sharding.plan import ShardingPlan
from xla_adapters.tracing.optimizers import prime
from xla_adapters.tracing.step_scope import StepScope

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
        former = [runtime.values.twin(runtime.values.snapshot(value)) for value in held]
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
                return runtime.executables.compile(pending, former)
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
