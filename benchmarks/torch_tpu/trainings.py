"""The trainings that `benchmarks.torch_tpu` compares: one model, the same batches, each way to run a step.

Each function trains in a forked child, and returns what it counted.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import TrainerCallback

from benchmarks.sizes import Size
from benchmarks.training import LEARNING_RATE, MAX_NORM, Batches, arguments, only_item
from benchmarks.zoo import Batch
from tests.torch_tpu import stand_in

# TorchTPU's attention is a kernel for TPUs, which the CPU cannot run.
_OPTIONS = (("attn_implementation", "eager"), ("use_cache", False))
_GPT2 = Size(2, 32, length=16, vocabulary=64, dropout=0.0, options=_OPTIONS)
_MODELS = {"GPT-2": _GPT2, "Llama": replace(_GPT2, family="llama", grows=2)}
_WARM_UP = 6
NAMES = tuple(_MODELS)


@dataclass
class Run:
    """One training.

    Attributes:
        losses: of each step.
        compiles: of all steps together.
        executions: per step, the median of those after the warm-up.
        transfers: from and to the device, likewise.
        host_ms: CPU time of the thread that trains, likewise. Reading the loss is not part of it.
        wall_ms: wall time, likewise; the device may still compute.
        sent_mb: what a rank sends in a step, if each collective is a ring; in runs that count it only.
    """

    losses: list[float] = field(default_factory=list)
    compiles: int | None = None
    executions: float | None = None
    transfers: float | None = None
    host_ms: float | None = None
    wall_ms: float | None = None
    sent_mb: float | None = None


class Meter:
    """Counts and times steps. Waits for the device around each, since it compiles and launches in threads of its own.

    Args:
        on_device: whether to count calls of the plugin; False for trainings on the plain CPU.
    """

    def __init__(self, *, on_device: bool = True) -> None:
        self._on_device = on_device
        self._counts: list[stand_in.Counts] = []
        self._host: list[float] = []
        self._wall: list[float] = []

    def begin(self) -> None:
        """A step begins."""
        self._before = self._counted()
        self._began = time.thread_time(), time.perf_counter()

    def end(self) -> None:
        """It has ended."""
        host, wall = time.thread_time(), time.perf_counter()
        self._host.append(1000 * (host - self._began[0]))
        self._wall.append(1000 * (wall - self._began[1]))
        self._counts.append(self._counted().since(self._before))

    def run(self, losses: list[float]) -> Run:
        """What was measured."""
        run = Run(losses, host_ms=_settled(self._host), wall_ms=_settled(self._wall))
        if self._on_device:
            run.compiles = sum(counts.compiles for counts in self._counts)
            run.executions = _settled([counts.executions for counts in self._counts])
            run.transfers = _settled([counts.transfers_to_device + counts.transfers_to_host for counts in self._counts])
        return run

    def _counted(self) -> stand_in.Counts:
        if not self._on_device:
            return stand_in.Counts(0, 0, 0, 0)
        torch.accelerator.synchronize()
        return stand_in.counts()


def _settled(values: Sequence[float]) -> float:
    return statistics.median(values[_WARM_UP:] or values)


@dataclass
class Training:
    """A model with its optimizer, a learning rate that falls to 0, and batches."""

    model: Any
    optimizer: torch.optim.Optimizer
    scheduler: Any
    batches: list[Batch]

    @classmethod
    def make(
        cls,
        name: str,
        steps: int,
        device: str,
        *,
        capturable: bool = False,
        falls: bool = True,
        distribute: Callable[[Any], Any] = lambda model: model,
    ) -> Training:
        """A training of one of `NAMES`; of a model that `distribute` returns."""
        torch.manual_seed(0)
        model = _MODELS[name].model().to(device)
        # TorchTPU unties weights where it moves a model.
        model.tie_weights()
        model.train()
        model = distribute(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, capturable=capturable)
        if falls:
            scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 0, steps)
        else:
            scheduler = transformers.get_constant_schedule(optimizer)
        return cls(model, optimizer, scheduler, _batches(steps))

    def step(self, batch: Batch) -> torch.Tensor:
        """From the batch to the update."""
        loss: torch.Tensor = self.model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def train(self, device: str, step: Callable[[Batch], Any] | None = None) -> Run:
        """Trains on all batches."""
        meter, losses = Meter(on_device=device != "cpu"), []
        for batch in self.batches:
            ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
            on_device = {name: value.chunk(ranks)[rank].to(device) for name, value in batch.items()}
            meter.begin()
            loss = (step or self.step)(on_device)
            meter.end()
            losses.append(loss.item())
            self.scheduler.step()
        return meter.run(losses)


def plain_cpu(name: str, steps: int, *, falls: bool = True) -> Run:
    """The loop without any of it; at a constant learning rate: what a schedule that has no effect would give."""
    return Training.make(name, steps, "cpu", falls=falls).train("cpu")


def eager(name: str, steps: int) -> Run:
    """TorchTPU as it is."""
    return Training.make(name, steps, "tpu").train("tpu")


def fused_eager(name: str, steps: int) -> Run:
    """Operations are deferred and fused."""
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):  # type: ignore[attr-defined]
        return eager(name, steps)


def compiled(name: str, steps: int) -> Run:
    """`torch.compile` of the whole step, as TorchTPU's guide has it."""
    training = Training.make(name, steps, "tpu", capturable=True)
    return training.train("tpu", torch.compile(training.step))


def single_trace(name: str, steps: int) -> Run:
    """TorchTPU's own trainer: at a constant learning rate and without clipping, which it does not have."""
    from torch_tpu._internal.optimizers.single_trace_trainer import AdamW, SingleTraceTrainer

    training = Training.make(name, steps, "tpu")
    trainer = SingleTraceTrainer(training.model, AdamW(lr=LEARNING_RATE, use_bfloat16_moments=False))
    example = {key: value.to("tpu") for key, value in training.batches[0].items()}
    return training.train("tpu", trainer.make_compiled_train_step(example, compile_fn=torch.compile))


def ours_traced(name: str, steps: int) -> Run:
    """`xla_adapters.step()`: one executable, traced at each call."""
    import xla_adapters

    xla_adapters.initialize()
    training = Training.make(name, steps, "tpu")

    def step(batch: Batch) -> torch.Tensor:
        with xla_adapters.step():
            return training.step(batch)

    return training.train("tpu", step)


def ours_replayed(name: str, steps: int) -> Run:
    """`xla_adapters.CompiledStep`: traced once."""
    import xla_adapters

    xla_adapters.initialize()
    training = Training.make(name, steps, "tpu")
    return training.train("tpu", xla_adapters.CompiledStep(training.step))


# ---- several ranks -------------------------------------------------------------------------------


# How often the bytes of the whole pass around the ring.
_TIMES = {"allreduce": 2, "allgather": 1, "reducescatter": 1}


class _Sent(TorchDispatchMode):
    """Counts the bytes that a rank sends in torch's collectives, if each is a ring."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.name().replace("_", "")
        for kind in [kind for kind in _TIMES if kind in name and "c10d" in name]:
            sizes = [item.nbytes for item in tree_leaves((args, result)) if isinstance(item, torch.Tensor)]
            self.bytes += _TIMES[kind] * max(sizes) * (1 - 1 / dist.get_world_size())
        return result


def on_rank(name: str, steps: int, how: str, *, compiles: bool = False, counts_bytes: bool = False) -> Run:
    """This rank's part of a training.

    Args:
        name: of the model.
        steps: number of steps.
        how: `"DDP"` and `"FSDP2"` are torch's; others are schemes of `distribute_module`.
        compiles: whether the whole step is compiled by `torch.compile`.
        counts_bytes: whether to count what is sent, and nothing else.
    """
    import xla_adapters
    from xla_adapters.sharding import distribute_module

    def distribute(model: Any) -> Any:
        if how == "DDP":
            return torch.nn.parallel.DistributedDataParallel(model)
        if how != "FSDP2":
            return distribute_module(model, partition_fn=how)
        mesh = init_device_mesh("tpu", (dist.get_world_size(),))
        for layer in model.transformer.h if hasattr(model, "transformer") else model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    if ours := how not in ("DDP", "FSDP2"):
        xla_adapters.initialize(spmd=True)
    else:
        dist.init_process_group("cpu:gloo,tpu:tpu_dist")
    training, sent = Training.make(name, steps, "tpu", capturable=compiles, distribute=distribute), _Sent()

    def counted(batch: Batch) -> torch.Tensor:
        sent.bytes = 0
        with sent:
            return training.step(batch)

    step = counted if counts_bytes else training.step
    run = training.train("tpu", xla_adapters.CompiledStep(step) if ours else torch.compile(step) if compiles else step)
    return replace(run, sent_mb=sent.bytes / 1e6)


# ---- transformers' Trainer -----------------------------------------------------------------------


class _Metered(TrainerCallback):
    """Meters steps, and keeps the logged losses."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.losses: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.meter.begin()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.meter.end()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))


def _trainer(name: str, steps: int, make: Callable[..., Any], **options: Any) -> Run:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        # The stand-in for the TPU has no pinned memory.
        options = {"optim": "adamw_torch", "lr_scheduler_type": "linear", "dataloader_pin_memory": False, **options}
        args = arguments(folder, **options)
        metered = _Metered(Meter(on_device=args.device.type != "cpu"))
        made = make(
            model=_MODELS[name].model(),
            args=args,
            train_dataset=Batches(_batches(steps)),
            data_collator=only_item,
            callbacks=[metered],
        )
        made.train()
    return metered.meter.run(metered.losses)


def trainer_on_cpu(name: str, steps: int) -> Run:
    """transformers' Trainer on the plain CPU."""
    return _trainer(name, steps, transformers.Trainer, use_cpu=True)


def stock_trainer(name: str, steps: int) -> Run:
    """transformers' Trainer with the device set by hand, without which it crashes."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "tpu:0"
    return _trainer(name, steps, transformers.Trainer)


def our_trainer(name: str, steps: int) -> Run:
    """`hf_trainer.Trainer`."""
    import hf_trainer

    return _trainer(name, steps, hf_trainer.Trainer)


def _batches(steps: int) -> list[Batch]:
    # Without a mask transformers looks for packed sequences, by a sum that the stand-in for the TPU cannot compile.
    mask = torch.ones(_GPT2.batch, _GPT2.length, dtype=torch.long)
    return [{**batch, "attention_mask": mask} for batch in _GPT2.batches(steps)]


def largest_difference(losses: list[float], reference: list[float]) -> float | None:
    """The largest difference of two trainings' losses; None if one of them has fewer."""
    if not losses or len(losses) != len(reference):
        return None
    return max(abs(mine - other) for mine, other in zip(losses, reference, strict=True))
