"""Trainings made up at random: a model, an optimizer, batches, and what is changed while it trains."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

import xla_adapters
from tests.device import DEVICE
from tests.support import differences, state_of
from xla_adapters import CompiledStep, StepSeed, XLAConfig

CLASSES = 3
SIZES = (2, 4)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.02),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.02),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.02),
}

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 7),
    "warmup": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3)),
    "steps": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
}


class _Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(self.norm(self.embedding(tokens)))).mean(1)


class _Mean(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.mean(1)


def _mlp(width: int, dropout: float) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, CLASSES))


def _normed(width: int, dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, CLASSES)
    )


def _convolution(width: int, dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Dropout(dropout), nn.Linear(8, CLASSES)
    )


def _embedding(width: int, dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(7, width), nn.LayerNorm(width), _Mean(), nn.Dropout(dropout), nn.Linear(width, CLASSES)
    )


def _vectors(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(size, 4, generator=generator)


def _images(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(size, 1, 4, 4, generator=generator)


def _tokens(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 7, (size, 5), generator=generator)


MODELS: dict[str, tuple[Callable[[int, float], nn.Module], Callable[[int, torch.Generator], torch.Tensor]]] = {
    "mlp": (_mlp, _vectors),
    "batch norm": (_normed, _vectors),
    "convolution": (_convolution, _images),
    "embedding": (_embedding, _tokens),
    "tied": (_Tied, _tokens),
}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A training, and what happens while it runs.

    Attributes:
        model, optimizer: keys of `MODELS` and `OPTIMIZERS`.
        schedule: key of `SCHEDULES`, or None.
        clipping: `"norm"`, `"value"` or None.
        precision: `"float32"`, `"autocast"` or `"bfloat16"`.
        accumulate: passes per update.
        observed: whether the whole state is read, and compared, after each pass; else after each event.
        events: a change (key of `CHANGES`), how many passes follow it, and the size of their batches.
    """

    model: str
    optimizer: str
    width: int = 4
    dropout: float = 0.0
    schedule: str | None = None
    clipping: str | None = None
    precision: str = "float32"
    accumulate: int = 1
    observed: bool = False
    events: tuple[tuple[str, int, int], ...] = ()


class ScenarioRun:
    """One of two trainings of a scenario.

    Args:
        scenario: what to train.
        replay: `step_replay` of the step.
    """

    def __init__(self, scenario: Scenario, replay: bool | str) -> None:
        self.scenario = scenario
        build, self._draw = MODELS[scenario.model]
        torch.manual_seed(0)
        self.model = build(scenario.width, scenario.dropout)
        if scenario.precision == "bfloat16":
            self.model = self.model.to(torch.bfloat16)
        self.model = self.model.to(DEVICE)
        self.use_optimizer(scenario.optimizer)
        self.clipping = scenario.clipping
        self.passes = 0
        self.losses: list[torch.Tensor] = []
        self.states: list[dict[str, Any]] = []
        self.aliases: list[torch.Tensor] = []
        config = XLAConfig(step_replay=replay)  # type: ignore[arg-type]
        self.step = CompiledStep(self._body(), config=config, seed=lambda: StepSeed(seed=7, step=self.passes))

    def use_optimizer(self, name: str) -> None:
        """Trains on with a new optimizer, and a new schedule."""
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        schedule = self.scenario.schedule
        self.schedule = None if schedule is None else SCHEDULES[schedule](self.optimizer)

    def _body(self) -> Callable[[torch.Tensor, torch.Tensor, bool], torch.Tensor]:
        autocast = self.scenario.precision == "autocast"

        def body(inputs: torch.Tensor, classes: torch.Tensor, last: bool) -> torch.Tensor:
            with torch.autocast(DEVICE, dtype=torch.bfloat16) if autocast else nullcontext():
                loss = nn.functional.cross_entropy(self.model(inputs).float(), classes)
            loss.backward()
            if last:
                if self.clipping == "norm":
                    nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
                elif self.clipping == "value":
                    nn.utils.clip_grad_value_(self.model.parameters(), 0.05)
                self.optimizer.step()
                self.optimizer.zero_grad()
            return loss.detach()

        return body

    def run(self) -> None:
        """Trains, intervenes and notes the state."""
        for change, passes, size in (("nothing", 5, SIZES[-1]), *self.scenario.events):
            CHANGES[change](self)
            for _ in range(passes):
                self._pass(size)
                if self.scenario.observed:
                    self.states.append(self.state())
            self.states.append(self.state())

    def _pass(self, size: int) -> None:
        generator = torch.Generator().manual_seed(self.passes)
        inputs = self._draw(size, generator)
        if self.scenario.precision == "bfloat16" and inputs.is_floating_point():
            inputs = inputs.to(torch.bfloat16)
        classes = torch.randint(0, CLASSES, (size,), generator=generator)
        last = (self.passes + 1) % self.scenario.accumulate == 0
        self.losses.append(self.step(inputs, classes, last))
        self.passes += 1
        if last and self.schedule is not None:
            self.schedule.step()

    def state(self) -> dict[str, Any]:
        """Everything, on the host."""
        state = state_of(self.model, self.optimizer)
        state["losses"] = torch.stack([loss.cpu() for loss in self.losses])
        state["aliases"] = [alias.detach().cpu().float().tolist() for alias in self.aliases]
        del state["host seed"]
        return state


def _layers(trained: ScenarioRun) -> list[nn.Module]:
    return [module for module in trained.model.modules() if list(module.parameters(recurse=False))]


def _freeze(trained: ScenarioRun) -> None:
    first = next(_layers(trained)[0].parameters())
    first.requires_grad_(not first.requires_grad)


def _rate(value: float) -> Callable[[ScenarioRun], None]:
    def change(trained: ScenarioRun) -> None:
        for group in trained.optimizer.param_groups:
            group["lr"] = value

    return change


def _decay(trained: ScenarioRun) -> None:
    for group in trained.optimizer.param_groups:
        if "weight_decay" in group:
            group["weight_decay"] = 0.0 if group["weight_decay"] else 0.2


def _load(trained: ScenarioRun) -> None:
    trained.model.load_state_dict({name: value.cpu() // 2 for name, value in trained.model.state_dict().items()})


def _load_optimizer(trained: ScenarioRun) -> None:
    trained.optimizer.load_state_dict(trained.optimizer.state_dict())


def _swap(name: str) -> Callable[[ScenarioRun], None]:
    return lambda trained: trained.use_optimizer(name)


def _dropout(trained: ScenarioRun) -> None:
    for module in trained.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.25 if module.p != 0.25 else 0.5


def _dropout_off(trained: ScenarioRun) -> None:
    for module in trained.model.modules():
        if isinstance(module, nn.Dropout):
            module.train(not module.training)


def _evaluation(trained: ScenarioRun) -> None:
    for module in trained.model.modules():
        # torch_xla 2.9 has no backward of batch norm in evaluation mode.
        if not isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            module.training = not module.training


def _edit(trained: ScenarioRun) -> None:
    with torch.no_grad():
        for parameter in _layers(trained)[-1].parameters():
            parameter.mul_(1.5)


def _edit_row(trained: ScenarioRun) -> None:
    with torch.no_grad():
        _layers(trained)[0].weight[0] = 0.25


def _edit_buffers(trained: ScenarioRun) -> None:
    for buffer in trained.model.buffers():
        buffer.add_(1)


def _edit_state(trained: ScenarioRun) -> None:
    for state in trained.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.ndim:
                value.mul_(0.5)


def _set_data(trained: ScenarioRun) -> None:
    weight = _layers(trained)[0].weight
    weight.data = (weight.detach() * 0.5).clone()


def _copies(trained: ScenarioRun) -> None:
    """Copying shares the buffer in torch_xla."""
    weight = _layers(trained)[0].weight
    with torch.no_grad():
        trained.aliases += [torch.zeros_like(weight).copy_(weight), weight.view(-1), weight.clone()]


def _restore(trained: ScenarioRun) -> None:
    """As an average of the weights is swapped in."""
    with torch.no_grad():
        for parameter in trained.model.parameters():
            parameter.copy_(parameter.detach().clone())


def _reinitialise(trained: ScenarioRun) -> None:
    layer = _layers(trained)[-1]
    layer.weight = nn.Parameter(layer.weight.detach().clone() * 0.5)
    trained.use_optimizer(trained.scenario.optimizer)


def _clipping(trained: ScenarioRun) -> None:
    trained.clipping = {"norm": "value", "value": None, None: "norm"}[trained.clipping]


def _gradients(trained: ScenarioRun) -> None:
    for parameter in trained.model.parameters():
        parameter.grad = torch.ones_like(parameter) * 0.1


def _hook(trained: ScenarioRun) -> None:
    _layers(trained)[0].register_forward_hook(lambda module, args, output: output * 0.5)


class _Stop(Exception):
    pass


def _fail(trained: ScenarioRun) -> None:
    """A pass that raises, and so changes nothing."""

    def stop(module: nn.Module, args: Any, output: Any) -> None:
        raise _Stop

    handle = _layers(trained)[-1].register_forward_hook(stop)
    generator = torch.Generator().manual_seed(0)
    inputs = trained._draw(SIZES[-1], generator)
    inputs = (
        inputs.to(torch.bfloat16) if trained.scenario.precision == "bfloat16" and inputs.is_floating_point() else inputs
    )
    try:
        trained.step(inputs, torch.zeros(SIZES[-1], dtype=torch.long), True)
    except _Stop:
        pass
    finally:
        handle.remove()


CHANGES: dict[str, Callable[[ScenarioRun], None]] = {
    "nothing": lambda trained: None,
    "freeze or thaw a parameter": _freeze,
    "rate": _rate(0.013),
    "rate of 0": _rate(0.0),
    "rate of 1": _rate(1.0),
    "decay": _decay,
    "load weights": _load,
    "load the optimizer": _load_optimizer,
    "swap to sgd": _swap("momentum"),
    "swap to adamw": _swap("adamw"),
    "dropout": _dropout,
    "dropout on or off": _dropout_off,
    "evaluation mode": _evaluation,
    "edit a layer": _edit,
    "edit a row": _edit_row,
    "edit buffers": _edit_buffers,
    "edit the state": _edit_state,
    "set data": _set_data,
    "copies": _copies,
    "write weights back": _restore,
    "new parameter": _reinitialise,
    "clipping": _clipping,
    "gradients": _gradients,
    "hook": _hook,
    "failing pass": _fail,
}


def replays_like_retraced(scenario: Scenario) -> tuple[int, int]:
    """Demands that both runs of a scenario come to the same state, to the last bit, all along.

    Returns:
        Passes that were replayed, and passes in all.
    """
    assert xla_adapters.get_runtime().replay_works
    retraced, replayed = ScenarioRun(scenario, False), ScenarioRun(scenario, "auto")
    retraced.run()
    replayed.run()
    assert retraced.step.replays == 0
    for number, (expected, found) in enumerate(zip(retraced.states, replayed.states, strict=True)):
        changed = differences(expected, found)
        assert not changed, f"{changed} in state {number}; traced again for {replayed.step.reasons}"
    return replayed.step.replays, replayed.passes
