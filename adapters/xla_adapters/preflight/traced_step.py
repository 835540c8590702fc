"""`trace_step`: traces a training step with tensors that have no memory, and lowers it for other devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

from xla_adapters.hlo.annotations import annotate, sharding
from xla_adapters.preflight.abstract_runtime import Shardings, abstract_runtime
from xla_adapters.preflight.job import StepJob
from xla_adapters.preflight.target import ModuleForm
from xla_adapters.runtime import Runtime, TileAssignment, get_runtime, using_runtime
from xla_adapters.runtime.modes import eager
from xla_adapters.runtime.transfers import uploading
from xla_adapters.sharding import Placement
from xla_adapters.sharding.measure import loss_of
from xla_adapters.tracing.optimizers import prime
from xla_adapters.tracing.step_scope import StepScope

# Tensors of a batch that are named.
_LISTED = 6


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """A training step, ready to be compiled.

    Attributes:
        module: a serialized HloModuleProto, or the text of an MLIR module, with the shardings of parameters and
            results, and what is donated.
        names: what each parameter of the module is, by its number: `"lm_head.weight"`, `"exp_avg of lm_head.weight"`,
            `"batch.input_ids"`. Parameters that are single numbers (the learning rate, ...) have no name.
        seconds: time of tracing and lowering.
        kind: which step of a training it is, in words.
        argument_bytes: of parameters, state and batch on one device, without padding; 0 if not counted.
        batch: of all devices, in words; empty if not known.
        form: of the module.
    """

    module: bytes
    names: dict[int, str]
    seconds: float
    kind: str = "training step"
    argument_bytes: int = 0
    batch: str = ""
    form: ModuleForm = "hlo"


def trace_step(job: StepJob) -> TracedStep:
    """Traces forward, loss, backward and update as a step of the training would; nothing has memory, nothing is run.

    The job's first plan counts.

    SPMD must be on, with as many devices as the plan's mesh.
    """
    begun = time.monotonic()
    runtime, shardings = abstract_runtime(get_runtime())
    with using_runtime(runtime), eager(True):
        placement = Placement(job.plan, runtime)
        placement.move_model(job.model)
        move_attributes(job.model, lambda tensor: shardings.make(tensor.shape, tensor.dtype))
        batch = _pytree.tree_map_only(torch.Tensor, runtime.transfers.to_device, job.batch)
        placement.place_batch(batch)
        optimizer = job.optimizer([value for value in job.model.parameters() if value.requires_grad])
        with uploading():
            prime(optimizer)
        module, names = _traced(job, optimizer, batch, placement, runtime, shardings)
    seconds = time.monotonic() - begun
    return TracedStep(module=module, names=names, seconds=seconds, batch=described_batch(job.batch))


def _traced(
    job: StepJob,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    placement: Placement,
    runtime: Runtime,
    shardings: Shardings,
) -> tuple[bytes, dict[int, str]]:
    held = dict(_named(job.model, optimizer, batch, runtime.device.owns))
    before = {name: runtime.values.snapshot(tensor) for name, tensor in held.items()}
    with placement.constraining(job.model):
        scope = StepScope(name="preflight step")
        scope.open()
        try:
            loss = run_step(job, batch, optimizer)
            outputs = pending_results(runtime)
            module, numbers = runtime.abstract.lower(list(outputs.values()), list(before.values()))
            # An update has the sharding of what it updates, and takes its memory.
            updated = {
                runtime.lazy.tensor_number(tensor): name
                for name, tensor in held.items()
                if runtime.tracing.is_pending(tensor)
            }
            tiles = {name: shardings.of(tensor) for name, tensor in before.items() if shardings.knows(tensor)}
        finally:
            scope.abort()
    del loss
    places = {name: number for name, number in zip(before, numbers, strict=True) if number is not None}
    annotated = annotate(
        module,
        {number: encoded(tiles[name]) for name, number in places.items() if name in tiles},
        {
            position: encoded(tiles[updated[number]])
            for position, number in enumerate(outputs)
            if number in updated and updated[number] in tiles
        },
        {places[name] for name in updated.values() if name in places},
    )
    return annotated, {number: name for name, number in places.items()}


def run_step(job: StepJob, batch: Any, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Forward, loss, backward and update. Returns the loss: a result of the step's graph if the caller holds it."""
    with job.around():
        loss = loss_of(job.model(**batch) if isinstance(batch, dict) else job.model(*batch))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def pending_results(runtime: Runtime) -> dict[int, torch.Tensor]:
    """The results of the step by their number, in the order in which a sync takes them."""
    found: dict[int, torch.Tensor] = {}
    for tensor in runtime.tracing.live_tensors():
        if runtime.tracing.is_pending(tensor):
            found.setdefault(runtime.lazy.tensor_number(tensor), tensor)
    return dict(sorted(found.items()))


def _named(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any, owned: Callable[[torch.Tensor], bool]
) -> Iterable[tuple[str, torch.Tensor]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    yield from model.named_parameters()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and owned(value):
                    yield f"{key} of {names[id(parameter)]}", value
    yield from model.named_buffers()
    yield from named_batch(batch, "batch")


def named_batch(value: Any, path: str) -> Iterable[tuple[str, torch.Tensor]]:
    """The tensors of a batch with their names in it."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_batch(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from named_batch(item, f"{path}[{index}]")


def described_batch(batch: Any) -> str:
    """The tensors of a batch with their shapes: `"input_ids 8x128, labels 8x128"`."""
    found = [
        f"{name.removeprefix('batch').removeprefix('.')} {'x'.join(map(str, tensor.shape))}".strip()
        for name, tensor in named_batch(batch, "batch")
        if tensor.ndim
    ]
    return ", ".join(found[:_LISTED]) + (f" and {len(found) - _LISTED} more" if len(found) > _LISTED else "")


def move_attributes(model: torch.nn.Module, moved: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replaces tensors on the meta device that modules hold as plain attributes (rotary frequencies, ...)."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor) and value.device.type == "meta":
                setattr(module, name, moved(value))


def encoded(tiles: TileAssignment | None) -> bytes:
    """As an OpSharding; empty if the tensor is whole on each device."""
    return b"" if tiles is None else sharding(tiles.counts, tiles.devices)
