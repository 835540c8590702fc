"""Code between two steps sees the gradients of the step before, as on the CPU; where nothing looks they are freed."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader
from transformers import get_scheduler
from transformers.optimization import Adafactor, AdafactorSchedule

import hf_trainer
from lightning_strategy import XLAEagerStrategy
from tests.hf_trainer.scenarios import Classifier, arguments, assert_close, on_cpu, vector_samples
from tests.lightning_strategy.scenarios import trainer as lightning_trainer
from tests.trainers import each_trainer
from xla_adapters.loop.gradient_reads import mentions_gradients, schedule_sees_gradients

pytestmark = pytest.mark.isolated


class _ByNorm(lr_scheduler.LRScheduler):
    """A rate that follows the norm of the gradients."""

    def get_lr(self) -> list[Any]:
        found = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not found:
            return [0.5 for _ in self.base_lrs]
        return [0.01 + float(sum(grad.abs().sum() for grad in found)) / 100 for _ in self.base_lrs]


def _by_lambda(optimizer: Any) -> Any:
    def factor(step: int) -> float:
        return 1.0 + sum(p.grad is not None for group in optimizer.param_groups for p in group["params"])

    return lr_scheduler.LambdaLR(optimizer, factor)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "class": _ByNorm,
    "lambda": _by_lambda,
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler([_ByNorm(optimizer)]),
}


def _rates_hf(schedule: Callable[[Any], Any], *, cpu: bool, make: Any = None) -> list[float]:
    net = Classifier()
    optimizer = make(net.parameters()) if make else torch.optim.SGD(net.parameters(), lr=0.1)
    options: dict[str, Any] = {"optimizers": (optimizer, schedule(optimizer))}
    args = {"max_steps": 4, "logging_steps": 1}
    if cpu:
        with on_cpu(net, vector_samples(16), args=args, **options) as trainer:
            trainer.train()
    else:
        trainer = hf_trainer.Trainer(net, arguments(**args), train_dataset=vector_samples(16), **options)
        trainer.train()
    return [float(entry["learning_rate"]) for entry in trainer.state.log_history if "loss" in entry]


class _Module(L.LightningModule):
    def __init__(self, schedule: Callable[[Any], Any]) -> None:
        super().__init__()
        self.net, self.schedule, self.rates = Classifier(), schedule, list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(**batch)["loss"]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.rates.append(float(self.optimizers().param_groups[0]["lr"]))  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": self.schedule(optimizer), "interval": "step"}]


def _rates_lightning(schedule: Callable[[Any], Any], *, cpu: bool) -> list[float]:
    module = _Module(schedule)
    fit = lightning_trainer(None if cpu else XLAEagerStrategy(), max_epochs=1)
    fit.fit(module, DataLoader(vector_samples(16), 4))  # type: ignore[arg-type]
    return module.rates


@each_trainer
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_sees_them(kind: str, name: str) -> None:
    rates = _rates_hf if kind == "hf" else _rates_lightning
    ours, expected = (rates(SCHEDULES[name], cpu=cpu) for cpu in (False, True))
    assert_close(ours, expected)
    assert len(set(expected)) > 1


def test_transformers_schedule_of_adafactor() -> None:
    def make(parameters: Any) -> Any:
        return Adafactor(parameters, scale_parameter=True, relative_step=True, warmup_init=True, lr=None)

    ours, expected = (_rates_hf(AdafactorSchedule, cpu=cpu, make=make) for cpu in (False, True))
    assert_close(ours, expected)
    assert max(expected) > 0


class _AtTheEnd(_Module):
    """Looks in a hook that runs once in an epoch, by a method of its own."""

    def on_train_epoch_end(self) -> None:
        self.note()

    def note(self) -> None:
        self.rates = [float(p.grad.abs().sum()) for p in self.parameters() if p.grad is not None]


def test_a_hook_at_the_end_of_the_epoch_sees_them() -> None:
    found = []
    for strategy in (XLAEagerStrategy(), None):
        module = _AtTheEnd(lambda optimizer: lr_scheduler.StepLR(optimizer, 1))
        lightning_trainer(strategy, max_epochs=1).fit(module, DataLoader(vector_samples(16), 4))  # type: ignore[arg-type]
        found.append(module.rates)
    assert_close(*found)


_tools = types.ModuleType("tools")
_tools.note = lambda module: [p.grad for p in module.parameters()]  # type: ignore[attr-defined]


_package = types.ModuleType("package")
_package.tools = _tools  # type: ignore[attr-defined]


def test_a_function_of_another_module_is_looked_into() -> None:
    def hook(module: Any) -> None:
        _tools.note(module)

    def of_inner(module: Any) -> None:
        _package.tools.note(module)

    assert mentions_gradients(hook)
    assert mentions_gradients(of_inner)


def test_a_function_whose_variable_has_no_value_yet_may_look() -> None:
    def hook(module: Any) -> None:
        later(module)

    assert mentions_gradients(hook)
    later = print


def test_what_does_not_look() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    for name in ("linear", "cosine", "constant_with_warmup", "polynomial"):
        schedule = get_scheduler(name, optimizer, num_warmup_steps=1, num_training_steps=4)
        assert not schedule_sees_gradients(schedule)
    rate = 0.5
    assert not schedule_sees_gradients(lr_scheduler.LambdaLR(optimizer, lambda step: rate**step))
    one, two = lr_scheduler.StepLR(optimizer, 2), lr_scheduler.ExponentialLR(optimizer, 0.5)
    assert not schedule_sees_gradients(lr_scheduler.SequentialLR(optimizer, [one, two], [1]))
    assert not schedule_sees_gradients(None)
    for make in SCHEDULES.values():
        assert schedule_sees_gradients(make(optimizer))
    assert not mentions_gradients(torch.no_grad()(lambda: None))
    assert mentions_gradients(_AtTheEnd(lambda optimizer: None).on_train_epoch_end)
