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
import transformers
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
    """

    losses: list[float] = field(default_factory=list)
    compiles: int | None = None
    executions: float | None = None
    transfers: float | None = None
    host_ms: float | None = None
    wall_ms: float | None = None


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
    return statistics.median(values[_WARM_UP:])


@dataclass
class Training:
    """A model with its optimizer, a learning rate that falls to 0, and batches."""

    model: Any
    optimizer: torch.optim.Optimizer
    scheduler: Any
    batches: list[Batch]

    @classmethod
    def make(cls, name: str, steps: int, device: str, *, capturable: bool = False, falls: bool = True) -> Training:
        """A training of one of `NAMES`."""
        torch.manual_seed(0)
        model = _MODELS[name].model().to(device)
        model.train()
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
            on_device = {name: value.to(device) for name, value in batch.items()}
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
    """`torch.compile` of the model, and of the optimizer's step."""
    training = Training.make(name, steps, "tpu", capturable=True)
    model, update = training.model, torch.compile(training.optimizer.step)
    training.model = torch.compile(model)

    def step(batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = training.model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        update()
        training.optimizer.zero_grad()
        return loss.detach()

    return training.train("tpu", step)


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
