"""`steps_per_execution` in Lightning: fewer executions, and the same results."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging
from lightning.pytorch.loggers import CSVLogger

import xla_adapters
from lightning_strategy import XLAEagerStrategy
from tests.lightning_strategy.scenarios import Classifier, Outcome, fit
from xla_adapters import UnsupportedOptionError

pytestmark = pytest.mark.isolated


class _Silent(Classifier):
    """Logs the mean loss of each epoch, and keeps no loss."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("mean", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


class _Looks(L.Callback):
    """Reads the weights after each step."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.norms.append(float(sum(parameter.norm() for parameter in pl_module.parameters())))


def _pair(
    several: int, *callbacks: list[L.Callback], make: type[_Silent] = _Silent, **options: Any
) -> tuple[Outcome, Outcome]:
    one, together = (
        fit(
            lambda: make(dropout=0.3),
            XLAEagerStrategy(steps_per_execution=count, free_grads=True),
            callbacks=lambda given=given: given,
            max_epochs=3,
            enable_progress_bar=False,
            **options,
        )
        for count, given in zip((1, several), callbacks or ([], []), strict=True)
    )
    before, after = one.module.state_dict(), together.module.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert one.trainer.callback_metrics.keys() == together.trainer.callback_metrics.keys()
    for name, value in one.trainer.callback_metrics.items():
        assert torch.equal(value, together.trainer.callback_metrics[name]), name
    return one, together


def test_the_same_run_in_fewer_executions() -> None:
    one, together = _pair(3)
    assert together.counters.executions < one.counters.executions


def test_a_callback_that_looks_sees_each_step() -> None:
    looks = _Looks(), _Looks()
    _pair(3, [looks[0]], [looks[1]])
    assert looks[0].norms == looks[1].norms
    assert len(set(looks[1].norms)) == len(looks[1].norms) > 6


class _Resets(_Silent):
    """Has a metric that is reset between two steps."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sum = torchmetrics.SumMetric()
        self.sums: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.sum.update(loss.detach())
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            self.sum.reset()

    def on_train_epoch_end(self) -> None:
        self.sums.append(float(self.sum.sum_value))


def test_a_metric_that_is_reset_between_steps() -> None:
    one, together = _pair(3, make=_Resets)
    assert one.module.sums == together.module.sums


class _LogsSteps(_Silent):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        self.log("both", loss * 2, on_step=True, on_epoch=True)
        return loss


def test_what_is_logged_and_not_wanted_yet_lets_steps_wait(tmp_path: Any) -> None:
    one, together = _pair(3, make=_LogsSteps, logger=CSVLogger(tmp_path), log_every_n_steps=50)
    # In each epoch: traced calls, a group of 3, and single calls for the rest, when the means are read.
    assert (one.counters.executions, together.counters.executions) == (18, 4 + 4 + 4)


def test_averages_of_weights_see_each_step() -> None:
    every: list[list[L.Callback]] = [[EMAWeightAveraging(decay=0.5)] for _ in range(2)]
    rarely: list[list[L.Callback]] = [
        [EMAWeightAveraging(decay=0.5, update_every_n_steps=3, update_starting_at_step=8)] for _ in range(2)
    ]
    means: list[list[L.Callback]] = [[WeightAveraging()] for _ in range(2)]
    for callbacks in (every, rarely, means):
        _pair(3, *callbacks)
    strategy = XLAEagerStrategy(step_replay=True)
    assert fit(_Silent, strategy, callbacks=lambda: [WeightAveraging()]).trainer.global_step == 12


def test_with_sharding_it_is_refused() -> None:
    xla_adapters.initialize(spmd=True)
    with pytest.raises(UnsupportedOptionError, match="steps_per_execution=2 with sharding"):
        XLAEagerStrategy(steps_per_execution=2, sharding="dp")
