"""Timed trainings with hand-written loops, without a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
import transformers
from torch import nn

from benchmarks.harness import Clock, Pause, Plan, Timing
from benchmarks.training import LEARNING_RATE, MAX_NORM
from benchmarks.zoo import Batch
from xla_adapters import CompiledStep, XLAConfig, get_runtime, initialize
from xla_adapters.utils.torch_modes import modules_compiled

LAZY, COMPILE = "lazy loop", "torch_xla.compile"
# Forward and backward by dynamo, and the update lazily, in `torch_xla.compile`, or by dynamo too.
OPENXLA_LAZY, OPENXLA_COMPILE, OPENXLA_DYNAMO = "openxla+lazy", "openxla+compile", "openxla+dynamo"
OPENXLA = (OPENXLA_LAZY, OPENXLA_COMPILE, OPENXLA_DYNAMO)
STEP = "CompiledStep"
STEP_TRACED = "CompiledStep traced"
# With a model that `torch.compile` compiled, as under `xla_mode="eager+dynamo"`.
INLINED = "CompiledStep+dynamo"
CPU, INDUCTOR = "plain CPU", "inductor"
# Only these keep freed memory (`initialize(keep_memory=)`), the others use the allocator's defaults.
OURS = (STEP, STEP_TRACED, INLINED)
XLA_RUNS = (LAZY, COMPILE, *OPENXLA, *OURS)
RUNS = (*XLA_RUNS, CPU, INDUCTOR)

Step = Callable[[Batch], torch.Tensor]


class _Loss(nn.Module):
    """Wraps a model so that it returns only its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.model(**batch).loss  # type: ignore[no-any-return]


def run(name: str, make: Callable[[], nn.Module], batches: Sequence[Batch], plan: Plan, pause: Pause) -> Timing:
    """Runs in a child.

    Args:
        name: one of `RUNS`.
        make: makes the model; called with a batch it returns something with a `loss`.
        batches: as many as the plan has steps.
        plan, pause: see `Clock`.
    """
    model = make().train()
    if name in (CPU, INDUCTOR):
        clock = Clock(plan, pause, lambda: None, xla=False)
        return clock.timing(_drive(_host_step(name, model), "cpu", batches, clock))
    initialize(eager=name in OURS, keep_memory=None if name in OURS else False)
    runtime = get_runtime()
    if name in (STEP, INLINED):
        # The first access to `replay_works` executes two tiny graphs, which must not be counted.
        assert runtime.replay_works
    model.to("xla")
    if isinstance(model, transformers.PreTrainedModel):
        # Moving to XLA makes two parameters of one that two modules share.
        model.tie_weights()
    clock = Clock(plan, pause, runtime.device.wait, batch_tensors=len(batches[0]))
    with ExitStack() as compiled:
        if name == INLINED:
            compiled.enter_context(modules_compiled([model], runtime.dynamo_backend))
        step = _device_step(name, model)
        timing = clock.timing(_drive(step, "xla", batches, clock))
    if name != STEP_TRACED and isinstance(step, CompiledStep) and step.replays < plan.steps * plan.rounds:
        raise RuntimeError(f"replayed {step.replays} times only: {step.reasons}")
    return timing


def _drive(step: Step, device: str, batches: Sequence[Batch], clock: Clock) -> list[float]:
    losses = []
    for batch in batches:
        losses.append(step({key: value.to(device) for key, value in batch.items()}))
        clock.step_done()
    return [float(loss) for loss in losses]


def parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Callable[[], None]]:
    """The module that computes the loss of a batch, and the function that updates the model after the backward."""

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return _Loss(model), update


def joined(loss_of: Callable[[Batch], torch.Tensor], update: Callable[[], object]) -> Step:
    """One step: loss, backward, and update."""

    def step(batch: Batch) -> torch.Tensor:
        loss = loss_of(batch)
        loss.backward()
        update()
        return loss.detach()

    return step


def _host_step(name: str, model: nn.Module) -> Step:
    # The fused update is the fastest that torch has on the CPU.
    loss_of, update = parts(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0, fused=True))
    return joined(torch.compile(loss_of) if name == INDUCTOR else loss_of, update)


def _device_step(name: str, model: nn.Module) -> Step:
    import torch_xla

    loss_of, update = parts(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0))
    if name in (STEP, INLINED):
        # Without verifications; `benchmarks.verification` measures their cost.
        return CompiledStep(joined(loss_of, update), config=XLAConfig(replay_verify_every=None))
    if name == STEP_TRACED:
        return CompiledStep(joined(loss_of, update), config=XLAConfig(step_replay=False))
    if name == COMPILE:
        return torch_xla.compile(joined(loss_of, update))  # type: ignore[no-any-return]
    if name in OPENXLA:
        loss_of = torch.compile(loss_of, backend="openxla")
    if name == OPENXLA_COMPILE:
        update = torch_xla.compile(update)
    if name == OPENXLA_DYNAMO:
        update = torch.compile(update, backend="openxla")
    step = joined(loss_of, update)

    def synced(batch: Batch) -> torch.Tensor:
        loss = step(batch)
        torch_xla.sync()
        return loss

    return synced
