"""`compiled_step`: the training step of a model, compiled under a plan and not executed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree

from xla_adapters.backend import get_backend
from xla_adapters.modes import eager
from xla_adapters.optimizers import prime
from xla_adapters.sharding.hlo import read_hlo, read_memory_report
from xla_adapters.sharding.measure.job import Job
from xla_adapters.sharding.measure.results import PlanResult
from xla_adapters.sharding.placement import Placement
from xla_adapters.sharding.plan import ShardingPlan
from xla_adapters.step_scope import StepScope
from xla_adapters.transfers import uploading

_HLO, _BUFFERS = ".cpu_after_optimizations.txt", "-buffer-assignment.txt"


def compiled_step(job: Job, plan: ShardingPlan, folder: Path, known: dict[bytes, PlanResult]) -> PlanResult:
    """Compiles forward pass, loss, backward pass and AdamW as in a training, and reads what came of it.

    Args:
        job: the model and the batch; its parameters are brought to the devices, as zeros.
        plan: where they lie.
        folder: where this process's compiler writes its programs (`--xla_dump_to`, as text); is empty again after.
        known: results by the name of their graph; gets this one. A graph is compiled once in a process, whatever the
            plans that lead to it are called.
    """
    begun = time.monotonic()
    graph = _compile(job, plan)
    if graph in known:
        return known[graph]
    # Uploads may have compiled something small; the step is the largest.
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
    backend, model = get_backend(), job.model
    placement = Placement(plan, backend)
    with eager(True):
        with uploading():
            _fill(model)
            placement.move_model(model)
            batch = _pytree.tree_map(_to_device, job.batch)
        backend.flush()
        placement.place_batch(batch)
        optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad])
        prime(optimizer)
        state = [value for entry in optimizer.state.values() for value in entry.values()]
        held = [value for value in (*model.parameters(), *state) if backend.is_backend_tensor(value)]
        former = [backend.twin(backend.snapshot(value)) for value in held]
        with placement.constraining(model):
            scope = StepScope(name="measured step")
            scope.open()
            try:
                with job.around():
                    loss = _loss(model(**batch) if isinstance(batch, dict) else model(*batch))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                pending = [value for value in backend.live_tensors() if backend.is_pending(value)]
                # In the order in which a sync takes them: the same program each time.
                pending.sort(key=backend.tensor_number)
                backend.set_execution_allowed(True)
                return backend.compile_graph(pending, former)
            finally:
                scope.abort()


def _fill(model: torch.nn.Module) -> None:
    """Zeros for the values that did not travel; ties as they were."""
    filled: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for key, value in module._parameters.items():
            if value is not None:
                if id(value) not in filled:
                    zeros = torch.zeros(value.shape, dtype=value.dtype)
                    filled[id(value)] = torch.nn.Parameter(zeros, value.requires_grad)
                module._parameters[key] = filled[id(value)]


def _to_device(value: Any) -> Any:
    return value.to(get_backend().device()) if isinstance(value, torch.Tensor) else value


def _loss(output: Any) -> torch.Tensor:
    """The loss a model gives, or the mean of all it gives."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    leaves = _pytree.tree_leaves(dict(output) if isinstance(output, dict) else output)
    means = [leaf.float().mean() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return torch.stack(means).sum()
