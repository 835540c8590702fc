"""What steps do beside operators on their state: replays are as if each pass was traced, or there are none."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel

import xla_adapters
from tests.device import DEVICE, ON_TORCH_TPU
from tests.replay.alike import Body, alike, update_of
from tests.replay.with_and_without_replay import TrainedStep
from tests.support import differences, update
from xla_adapters import CompiledStep
from xla_adapters.tracing.activation_checkpointing import checkpoint

pytestmark = pytest.mark.isolated


def _trained(optimizer: Callable[[Any], Optimizer], *, passes: int = 8) -> Body:
    def body(make: Callable[..., CompiledStep[Any]]) -> Any:
        model = nn.Linear(4, 3).to(DEVICE)
        own = optimizer(model.parameters())
        step = make(update_of(model, own))
        losses = [step(torch.full((2, 4), number + 1.0)) for number in range(passes)]
        return losses, model, own.told() if isinstance(own, _Own) else None

    return body


class _Own(Optimizer):
    """Gradient descent whose rate depends on how often it stepped."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.begin()

    def begin(self) -> None:
        """What it keeps."""

    def rate(self) -> float:
        """Of this step."""
        return 0.1

    def told(self) -> Any:
        """What it keeps, to be compared."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        rate = self.rate()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-rate)


class _InDictionary(_Own):
    def begin(self) -> None:
        self.stats = {"deep": {"steps": 0}}

    def rate(self) -> float:
        self.stats["deep"]["steps"] += 1
        return 0.1 / self.stats["deep"]["steps"]

    def told(self) -> Any:
        return self.stats


class _InList(_Own):
    def begin(self) -> None:
        self.history: list[int] = []

    def rate(self) -> float:
        self.history.append(1)
        return 0.1 / len(self.history)

    def told(self) -> Any:
        return self.history


class _InGroup(_InList):
    def begin(self) -> None:
        self.history = self.param_groups[0]["history"] = []

    def rate(self) -> float:
        self.param_groups[0]["history"].append(1)
        return 0.1 / len(self.history)


class _Count:
    def __init__(self) -> None:
        self.count = 0

    def next(self) -> float:
        self.count += 1
        return 0.1 / self.count


class _InObject(_Own):
    def begin(self) -> None:
        self.counter = _Count()

    def rate(self) -> float:
        return self.counter.next()

    def told(self) -> Any:
        return self.counter.count


class _OfNoParameter(_Own):
    def rate(self) -> float:
        state: dict[str, int] = self.state["all"]  # type: ignore[index]
        state["steps"] = state.get("steps", 0) + 1
        return 0.1 / state["steps"]

    def told(self) -> Any:
        return self.state["all"]["steps"]  # type: ignore[index]


_steps = 0
_log: list[int] = []


class _InGlobal(_Own):
    def begin(self) -> None:
        global _steps
        _steps = 0

    def rate(self) -> float:
        global _steps
        _steps += 1
        return 0.1 / _steps

    def told(self) -> Any:
        return _steps


class _InGlobalList(_Own):
    def begin(self) -> None:
        _log.clear()

    def rate(self) -> float:
        _note()
        return 0.1 / len(_log)

    def told(self) -> Any:
        return _log


def _note() -> None:
    _log.append(1)


class _InClass(_Own):
    steps = 0

    def begin(self) -> None:
        _InClass.steps = 0

    def rate(self) -> float:
        type(self).steps += 1
        return 0.1 / self.steps

    def told(self) -> Any:
        return self.steps


class _Random(_Own):
    def rate(self) -> float:
        return float(torch.rand(()))


class _Momentum(torch.optim.SGD):
    """What it overrides is called by the library's step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.counter = _Count()

    def _init_group(self, group: Any, *lists: Any) -> Any:
        group["lr"] = self.counter.next()
        return super()._init_group(group, *lists)  # type: ignore[misc]


def test_optimizers_that_keep_more_on_the_host() -> None:
    # The list is made here: a closure may hold it as well.
    counted: list[int] = []

    class InClosure(_Own):
        def begin(self) -> None:
            counted.clear()

        def rate(self) -> float:
            counted.append(1)
            return 0.1 / len(counted)

        def told(self) -> Any:
            return counted

    kinds = (_InDictionary, _InList, _InGroup, _InObject, _OfNoParameter, _InGlobal, _InGlobalList, _InClass)
    for kind in (*kinds, InClosure, _Momentum):
        step = alike(_trained(kind))
        assert step.replays == 0
        assert any("none of the known optimizers" in reason for reason in step.reasons), (kind, step.reasons)
    for kind in (_Random, _Own):
        assert alike(_trained(kind)).replays == 0


def _clamp(optimizer: Optimizer, *_: Any) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.clamp_(-0.05, 0.05)


def _replace_step(optimizer: Any) -> None:
    stock = optimizer.step

    def step(*args: Any) -> None:
        stock(*args)
        _clamp(optimizer)

    optimizer.step = step


def _changed(change: Callable[[Optimizer], Any], moment: int) -> Body:
    def body(make: Callable[..., CompiledStep[Any]]) -> Any:
        model = nn.Linear(4, 3).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step, losses, handle = make(update_of(model, optimizer)), [], None
        for number in range(8):
            if number == moment:
                handle = change(optimizer)
            losses.append(step(torch.full((2, 4), number + 1.0)))
        if handle is not None:
            handle.remove()
        return losses, model

    return body


def test_hooks_of_optimizers() -> None:
    changes: list[tuple[Callable[[Optimizer], Any], str]] = [
        (lambda optimizer: optimizer.register_step_post_hook(_clamp), "the step of SGD has a hook (_clamp)"),
        (lambda optimizer: optimizer.register_step_pre_hook(_clamp), "the step of SGD has a hook (_clamp)"),
        (lambda optimizer: register_optimizer_step_post_hook(_clamp), "the step of SGD has a hook (_clamp)"),
        (_replace_step, "the step of SGD was replaced by another one"),
    ]
    for change, reason in changes:
        for moment in (0, 4):
            step = alike(_changed(change, moment))
            assert step.replays == max(0, moment - 2), step.reasons
            assert list(step.reasons) == [reason]

    def scheduled(make: Callable[..., CompiledStep[Any]]) -> Any:
        model = nn.Linear(4, 3).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = make(update_of(model, optimizer))
        losses = [step(torch.ones(2, 4)) for _ in range(4)]
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for _ in range(4):
            losses.append(step(torch.ones(2, 4)))
            schedule.step()
        return losses, model

    assert alike(scheduled).replays == 6


def test_verifying_a_correct_step_warns_of_nothing() -> None:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("xla_adapters").addHandler(handler)

    def run(trained: TrainedStep) -> None:
        schedule = torch.optim.lr_scheduler.LinearLR(trained.optimizer, 1.0, 0.0, total_iters=20)
        for _ in range(26):
            trained.run(1)
            schedule.step()

    for optimizer in (torch.optim.AdamW, torch.optim.SGD):
        retraced = TrainedStep(False, optimizer)
        replayed = TrainedStep("auto", optimizer, config={"replay_verify_every": 4})
        run(retraced)
        run(replayed)
        assert differences(retraced.state(), replayed.state()) == []
        assert replayed.step.replays >= 15, replayed.step.reasons
    assert not [message for message in messages if "differs" in message], messages


def test_tensors_written_through_an_alias() -> None:
    # Before that a copy of a model shares its buffers on TorchTPU.
    xla_adapters.initialize()

    def averaged(write: Callable[[torch.Tensor, torch.Tensor], object]) -> Body:
        def body(make: Callable[..., CompiledStep[Any]]) -> Any:
            model = nn.Linear(4, 3).to(DEVICE)
            average = copy.deepcopy(model)
            update = update_of(model, torch.optim.AdamW(model.parameters(), lr=0.05))

            def function(inputs: torch.Tensor) -> torch.Tensor:
                loss = update(inputs)
                with torch.no_grad():
                    for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                        write(mine, theirs)
                return loss

            step = make(function)
            return [step(torch.full((2, 4), number + 1.0)) for number in range(6)], model, average

        return body

    writes: list[Callable[[torch.Tensor, torch.Tensor], object]] = [
        lambda mine, theirs: mine.data.copy_(mine.data * 0.9 + theirs.data * 0.1),
        lambda mine, theirs: mine.data.copy_(theirs.data),
        lambda mine, theirs: mine.detach().copy_(mine.detach() * 0.9 + theirs.detach() * 0.1),
    ]
    for write in writes:
        step = alike(averaged(write))
        # A placeholder's aliases are placeholders.
        assert step.replays if ON_TORCH_TPU else "through an alias" in str(step.reasons)

    def of_torch(make: Callable[..., CompiledStep[Any]]) -> Any:
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).to(DEVICE)
        average = AveragedModel(model)
        update = update_of(model, torch.optim.AdamW(model.parameters(), lr=0.05))

        def function(inputs: torch.Tensor) -> torch.Tensor:
            loss = update(inputs)
            average.update_parameters(model)
            return loss

        step = make(function)
        return [step(torch.randn(2, 4)) for _ in range(6)], model, average.module

    def recomputed(make: Callable[..., CompiledStep[Any]]) -> Any:
        model = nn.Linear(4, 3).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def function(inputs: torch.Tensor) -> torch.Tensor:
            loss = checkpoint(model, inputs.requires_grad_()).square().mean()
            update(loss, optimizer)
            return loss.detach()  # type: ignore[no-any-return]

        step = make(function)
        return [step(torch.randn(2, 4)) for _ in range(6)], model

    alike(of_torch)
    alike(recomputed)


def test_batches_that_are_written_or_part_of_the_state() -> None:
    def filled(make: Callable[..., CompiledStep[Any]]) -> Any:
        model = nn.Linear(4, 3).to(DEVICE)
        update = update_of(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def function(inputs: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
            flag.fill_(5.0)
            return update(inputs)

        step = make(function)
        first, second = (torch.zeros(2, device=DEVICE) for _ in range(2))
        for _ in range(4):
            step(torch.ones(2, 4), first)
        first.zero_()
        step(torch.ones(2, 4), second)
        return first, second, model

    assert "the step writes into a tensor of its batch" in alike(filled).reasons

    def of_state(make: Callable[..., CompiledStep[Any]]) -> Any:
        model = nn.Linear(4, 4).to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        step = make(update_of(model, optimizer))
        losses = [step(torch.full((4, 4), number + 1.0)) for number in range(4)]
        clone, other = model.weight.detach().clone(), model.weight.detach().clone()
        for batch in (clone, torch.ones(4, 4), clone, clone, other, other, clone, torch.ones(4, 4)):
            losses.append(step(batch))
        moments = [state["exp_avg"] for state in optimizer.state.values()]
        return losses, clone, other, model, moments

    step = alike(of_state, replay_verify_every=None)
    assert step.replays == 10, step.reasons


def test_parameters_in_no_module() -> None:
    def body(make: Callable[..., CompiledStep[Any]]) -> Any:
        weight = torch.randn(3, 4).to(DEVICE).requires_grad_()
        bias = torch.zeros(3, device=DEVICE, requires_grad=True)
        optimizer = torch.optim.SGD([weight, bias], lr=0.1)

        def function(inputs: torch.Tensor) -> torch.Tensor:
            return update(nn.functional.linear(inputs, weight, bias).square().mean(), optimizer)

        step = make(function)
        losses = [step(torch.full((2, 4), number + 1.0)) for number in range(4)]
        weight.requires_grad_(False)
        losses += [step(torch.full((2, 4), number + 1.0)) for number in range(4)]
        return losses, weight, bias

    step = alike(body)
    assert step.replays == 4
    assert "the shape, dtype or mode of weight changed" in step.reasons
