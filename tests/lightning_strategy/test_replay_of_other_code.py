"""User code that is replaced between two steps, and the arguments that Lightning gives to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import nn

from tests.isolation import isolated
from tests.lightning_strategy.scenarios import FEATURES, Classifier, loader
from tests.lightning_strategy.test_replay import pair


class _At(L.Callback):
    """Calls a function with the module before each of some batches, by their indices."""

    def __init__(self, actions: dict[int, Callable[[Any], object]]) -> None:
        self.actions = actions

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in self.actions:
            self.actions[batch_idx](pl_module)


class _Stages(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.calls: list[int] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(self.first(inputs))  # type: ignore[no-any-return]

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def second_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch) * 0.5

    def third_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch) * 0.1

    def counting_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.calls.append(1)
        return self.loss(batch)

    def second_forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs)  # type: ignore[no-any-return]

    def third_forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(-inputs)  # type: ignore[no-any-return]

    def counting_forward_of_net(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls.append(1)
        return self.net(inputs)  # type: ignore[no-any-return]

    def counting_forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls.append(1)
        return inputs

    def halving(self, *arguments: Any) -> None:
        for parameter in self.net.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)


def _replaced(name: str, *others: str) -> dict[int, Callable[[Any], object]]:
    """Replaces a method every six batches."""

    def replace(other: str) -> Callable[[Any], object]:
        return lambda module: setattr(module, name, getattr(module, other))

    return {6 * (index + 1): replace(other) for index, other in enumerate(others)}


def _run(
    actions: dict[int, Callable[[Any], object]], replays: int, *, make: type[Classifier] = _Stages, **options: Any
) -> Any:
    found = {"train": replays} if replays else {}
    return pair(
        make, found, callbacks=lambda: [_At(actions)], **{"max_epochs": 1, "data": lambda: loader(20), **options}
    )


@isolated
def test_other_code_takes_effect_at_once() -> None:
    _run(_replaced("training_step", "second_step", "third_step"), 13)
    # One more call is traced: without the first layer there is one gradient less.
    _run(_replaced("forward", "second_forward", "third_forward"), 12)
    _run(_replaced("on_after_backward", "halving"), 15)
    _run(_replaced("on_before_optimizer_step", "halving"), 15)


class _Rewritten(_Stages):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)


@isolated
def test_other_code_of_the_class_takes_effect_at_once() -> None:
    def rewrite(module: Any) -> None:
        _Rewritten.training_step = _Stages.second_step  # type: ignore[method-assign]

    def put_back(module: Any) -> None:
        _Rewritten.training_step = stock  # type: ignore[method-assign]

    stock = _Rewritten.training_step
    _run({0: put_back, 6: rewrite}, 15, make=_Rewritten)


@isolated
def test_other_code_is_examined_before_it_is_left_out() -> None:
    def in_a_known_module(module: Any) -> None:
        module.first.forward = module.counting_forward

    examples: list[tuple[dict[int, Callable[[Any], object]], int]] = [
        (_replaced("training_step", "second_step", "counting_step"), 7),
        (_replaced("forward", "second_forward", "counting_forward_of_net"), 6),
        ({12: in_a_known_module}, 9),
    ]
    for actions, replays in examples:
        run = _run(actions, replays)
        assert len(run.module.calls) == 8
        reasons = run.module.programs["train"].replay_reasons
        assert any("known to be safe" in reason for reason in reasons), reasons


class _Zeroes(Classifier):
    """Collects gradients in a hook of its own."""

    def __init__(self) -> None:
        super().__init__(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05))

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 8 == 0:
            optimizer.zero_grad()


class _ZeroesLater(_Zeroes):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if epoch > 0:
            optimizer.zero_grad()


class _KeepsBuffers(_Zeroes):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class _CountsClips(Classifier):
    clips = 0

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        type(self).clips += 1
        super().clip_gradients(*args, **kwargs)


class _Prefixes(Classifier):
    def log(self, name: str, *args: Any, **kwargs: Any) -> None:
        super().log("train/" + name, *args, **kwargs)


@isolated
def test_what_hooks_are_given() -> None:
    _run({}, 17, make=_KeepsBuffers)
    _run({}, 17, make=_Prefixes)
    _run({}, 0, make=_Zeroes)
    _run({}, 0, make=_ZeroesLater, max_epochs=2, data=lambda: loader(8))
    _run({}, 0, make=_CountsClips, gradient_clip_val=0.1)
    assert _CountsClips.clips == 40


class _NoFunction(Classifier):
    def on_train_start(self) -> None:
        self.calls = 0
        self.training_step = _Called(self)  # type: ignore[method-assign]


class _Called:
    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, batch: Any, batch_idx: int) -> Any:
        return self.module.loss(batch)


@isolated
def test_a_step_that_is_no_function() -> None:
    run = _run({}, 0, make=_NoFunction)
    assert any("it is a _Called" in reason for reason in run.module.programs["train"].replay_reasons)
