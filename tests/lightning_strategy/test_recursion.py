"""A recursion without end, and a fit near the recursion limit: whatever fails then, later fits train as ever."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import xla_adapters
from lightning_strategy import XLAEagerStrategy
from tests.isolation import isolated
from tests.lightning_strategy.scenarios import Classifier, fit, loader, trainer


class InForward(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        def endless(value: torch.Tensor) -> torch.Tensor:
            return endless(torch.relu(value))

        return endless(self.net(batch[0])).mean()


class InBackward(Classifier):
    """Calls itself through the strategy."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.manual_backward(self.loss(batch))

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self.manual_backward(loss)


class InAutomaticBackward(Classifier):
    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self.trainer.strategy.backward(loss, None)


class InUpdate(Classifier):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.strategy.optimizer_step(self.trainer.optimizers[0], lambda: self.optimizer_step(*args, **kwargs))


class InValidation(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.trainer.strategy.validation_step(batch, batch_idx)


def modes() -> tuple[object, ...]:
    """What a step changes in the process."""
    runtime = xla_adapters.get_runtime()
    return (
        xla_adapters.in_step(),
        runtime.tracing.execution_allowed(),
        runtime.tracing.eager(),
        torch.is_grad_enabled(),
        torch._C._is_multithreading_enabled(),
        torch.compiler._is_compiling_flag,
        torch.is_inference_mode_enabled(),
        torch.overrides._get_current_function_mode_stack(),
        sys.getrecursionlimit(),
    )


@isolated
@pytest.mark.parametrize("kind", [InForward, InBackward, InAutomaticBackward, InUpdate, InValidation])
def test_a_recursion_without_end_leaves_the_process_usable(kind: type[Classifier]) -> None:
    before = fit(Classifier, XLAEagerStrategy(), max_epochs=1)
    usual = modes()
    for _ in range(2):
        with pytest.raises(RecursionError):
            trainer(XLAEagerStrategy(), max_epochs=1).fit(kind(), loader(), loader())
        assert modes() == usual
        assert xla_adapters.get_runtime().tracing.pending_count() == 0
    after = fit(Classifier, XLAEagerStrategy(), max_epochs=1)
    assert after.module.losses == before.module.losses
    assert (after.counters.compiles, after.counters.executions) == (0, before.counters.executions)


@isolated
def test_an_exception_that_training_step_catches_does_not_end_the_step() -> None:
    class Catches(InBackward):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            with pytest.raises(ZeroDivisionError):
                self.manual_backward(loss)
            self.optimizers().zero_grad()
            loss.backward()
            self.optimizers().step()
            return loss

        def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            raise ZeroDivisionError

    ours, plain = fit(Catches, XLAEagerStrategy(), max_epochs=1), fit(Catches, max_epochs=1)
    torch.testing.assert_close(ours.module.net[0].weight, plain.module.net[0].weight, atol=2e-6, rtol=0)
    assert ours.counters.executions == 6


def deep(frames: int, function: Callable[[], Any]) -> Any:
    return function() if frames == 0 else deep(frames - 1, function)


@isolated
def test_a_fit_near_the_recursion_limit_leaves_the_process_usable() -> None:
    """Lightning's own handling of the exception may fail, too, so that no teardown is called."""
    before = fit(Classifier, XLAEagerStrategy(), max_epochs=1)
    usual, failed, run = modes(), 0, trainer(XLAEagerStrategy(), max_epochs=1)
    for room in range(12, 60, 9):
        frames = sys.getrecursionlimit() - len(inspect.stack()) - room
        try:
            deep(frames, lambda: trainer(XLAEagerStrategy(), max_epochs=1).fit(Classifier(), loader(2), loader(1)))
        except BaseException:  # noqa: BLE001 (of any kind: what meets the limit decides)
            failed += 1
        try:
            deep(frames, lambda: run.fit(Classifier(), loader(2), loader(1)))
        except BaseException:  # noqa: BLE001
            failed += 1
        after = fit(Classifier, XLAEagerStrategy(), max_epochs=1)
        assert after.module.losses == before.module.losses, room
        assert modes() == usual, room
    assert failed >= 6
    run.fit(Classifier(), loader(2))
