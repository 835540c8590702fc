"""Trainings that are timed, by loops written by hand: no Trainer around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import transformers
from torch import nn

from benchmarks import zoo
from benchmarks.clock import Clock, Plan, Timing
from benchmarks.training import LEARNING_RATE, MAX_NORM
from benchmarks.turns import PassOn
from xla_adapters import CompiledStep, XLAConfig, get_backend, initialize
from xla_adapters.replay.places import PassTensors, Place
from xla_adapters.replay.recording import Recording

LAZY, COMPILE = "lazy loop", "torch_xla.compile"
# Forward and backward by dynamo, and the update lazily, in `torch_xla.compile`, or by dynamo too.
OPENXLA_LAZY, OPENXLA_COMPILE, OPENXLA_DYNAMO = "openxla+lazy", "openxla+compile", "openxla+dynamo"
OPENXLA = (OPENXLA_LAZY, OPENXLA_COMPILE, OPENXLA_DYNAMO)
STEP, TOGETHER, EXECUTABLE = "CompiledStep", "CompiledStep x5", "executable"
CPU, INDUCTOR = "plain CPU", "inductor"
# The others have the allocator as it comes.
OURS = (STEP, TOGETHER, EXECUTABLE)
XLA_RUNS = (LAZY, COMPILE, *OPENXLA, *OURS)
RUNS = (*XLA_RUNS, CPU, INDUCTOR)

Step = Callable[[zoo.Batch], torch.Tensor]


class _Loss(nn.Module):
    """Hands out the loss alone: what is compiled has one output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: zoo.Batch) -> torch.Tensor:
        return self.model(**batch).loss  # type: ignore[no-any-return]


def run(name: str, make: Callable[[], nn.Module], batches: Sequence[zoo.Batch], plan: Plan, pass_on: PassOn) -> Timing:
    """Runs in a child.

    Args:
        name: one of `RUNS`.
        make: makes the model; called with a batch it returns something with a `loss`.
        batches: as many as the plan has steps.
        plan, pass_on: see `Clock`.
    """
    model = make().train()
    if name in (CPU, INDUCTOR):
        clock = Clock(plan, pass_on, lambda: None, xla=False)
        return clock.timing(_drive(_host_step(name, model), "cpu", batches, clock))
    initialize(keep_memory=None if name in OURS else False)
    backend = get_backend()
    if name in (STEP, EXECUTABLE):
        # It tries out graphs of its own, which are none of the training's.
        assert backend.replay_works
    model.to("xla")
    if isinstance(model, transformers.PreTrainedModel):
        # Moving to XLA makes two parameters of one that two modules share.
        model.tie_weights()
    clock = Clock(plan, pass_on, backend.wait)
    step = _device_step(name, model)
    timing = clock.timing(_drive(step, "xla", batches, clock))
    if isinstance(step, CompiledStep) and step.replays < plan.steps * plan.rounds:
        raise RuntimeError(f"replayed {step.replays} times only: {step.reasons}")
    return timing


def _drive(step: Step, device: str, batches: Sequence[zoo.Batch], clock: Clock) -> list[float]:
    losses = []
    for batch in batches:
        losses.append(step({key: value.to(device) for key, value in batch.items()}))
        clock.step_done()
    return [float(loss) for loss in losses]


def _parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Callable[[], None]]:
    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return _Loss(model), update


def _joined(loss_of: Callable[[zoo.Batch], torch.Tensor], update: Callable[[], object]) -> Step:
    def step(batch: zoo.Batch) -> torch.Tensor:
        loss = loss_of(batch)
        loss.backward()
        update()
        return loss.detach()

    return step


def _host_step(name: str, model: nn.Module) -> Step:
    # The fused update is the fastest that torch has on the CPU.
    loss_of, update = _parts(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0, fused=True))
    return _joined(torch.compile(loss_of) if name == INDUCTOR else loss_of, update)


def _device_step(name: str, model: nn.Module) -> Step:
    import torch_xla

    loss_of, update = _parts(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0))
    if name == STEP:
        return CompiledStep(_joined(loss_of, update))
    if name == TOGETHER:
        # Of the warm-up one step is left waiting, and so of each block of ten.
        return CompiledStep(_joined(loss_of, update), config=XLAConfig(steps_per_execution=5))
    if name == EXECUTABLE:
        return _Executable(_joined(loss_of, update))
    if name == COMPILE:
        return torch_xla.compile(_joined(loss_of, update))  # type: ignore[no-any-return]
    if name in OPENXLA:
        loss_of = torch.compile(loss_of, backend="openxla")
    if name == OPENXLA_COMPILE:
        update = torch_xla.compile(update)
    if name == OPENXLA_DYNAMO:
        update = torch.compile(update, backend="openxla")
    step = _joined(loss_of, update)

    def synced(batch: zoo.Batch) -> torch.Tensor:
        loss = step(batch)
        torch_xla.sync()
        return loss

    return synced


class _Executable:
    """The executable of a `CompiledStep`, called again and again with its own results: nothing around it.

    The numbers of the update (the bias corrections) stay as they are.
    """

    def __init__(self, step: Step) -> None:
        self._step: CompiledStep[torch.Tensor] = CompiledStep(step)
        self._recording: Recording | None = None
        self._inputs: list[torch.Tensor] = []
        self._carried: list[tuple[int, int]] = []

    def __call__(self, batch: zoo.Batch) -> torch.Tensor:
        if self._recording is None:
            loss = self._step(batch)
            if self._step.replays:
                self._take_over(list(batch.values()))
            return loss
        backend, values = get_backend(), list(batch.values())
        for position, source in enumerate(self._recording.sources):
            if source == "seed":
                self._inputs[position] = backend.seed_input()
            elif isinstance(source, Place) and source.kind == "batch":
                self._inputs[position] = values[int(source.name)]
        taken = [self._inputs[position] for position, _ in self._carried]
        results = backend.run_graph(self._recording.executable, self._inputs, taken=taken)
        for position, result in self._carried:
            self._inputs[position] = results[result]
        backend.finish_replayed()
        (loss_at,) = self._recording.kept["result"].leaves
        assert isinstance(loss_at, int)
        return results[loss_at]

    def _take_over(self, batch: list[torch.Tensor]) -> None:
        replay = self._step.program._replay
        assert replay is not None
        (plan,) = replay._plans.values()
        recording = plan.recording
        assert recording is not None
        numbers = recording.new_numbers(recording.updates)
        self._inputs = recording.inputs(PassTensors(batch), numbers, get_backend())
        at = {place.key: index for index, places in enumerate(recording.targets) for place in places}
        self._carried = [
            (position, at[source.key])
            for position, source in enumerate(recording.sources)
            if isinstance(source, Place) and source.key in at
        ]
        self._recording = recording
