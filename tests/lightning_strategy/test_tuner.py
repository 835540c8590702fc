"""Lightning's tuner finds the same values on the device as on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder

import xla_adapters
from lightning_strategy import XLAEagerStrategy
from tests.isolation import isolated
from tests.lightning_strategy.scenarios import Outcome, WithoutBatchNorm, assert_close, fit, loader


class Tuned(WithoutBatchNorm):
    """Has the attributes that Lightning's tuner sets: `lr` and `batch_size`."""

    def __init__(self) -> None:
        super().__init__()
        self.lr, self.batch_size = 1e-2, 2
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sizes.append(len(batch[0]))
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> Any:
        return loader(rows=64, batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return loader(rows=16, batch_size=self.batch_size)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def tuned(callback: Callable[[], Callback], make: Callable[[], Any] = Tuned) -> tuple[Outcome, Outcome]:
    def nothing() -> None:
        return None

    ours, plain = (
        fit(make, strategy, data=nothing, callbacks=lambda: [callback()], max_epochs=1)
        for strategy in (XLAEagerStrategy(), None)
    )
    assert ours.module.sizes == plain.module.sizes
    assert_close(ours.module.losses, plain.module.losses)
    return ours, plain


@isolated
@pytest.mark.parametrize("mode", ["power", pytest.param("binsearch", marks=pytest.mark.slow)])
def test_batch_size_finder(mode: str) -> None:
    ours, plain = tuned(lambda: BatchSizeFinder(mode=mode, steps_per_trial=2, max_trials=3))
    assert ours.module.batch_size == plain.module.batch_size > 2
    # A graph for each batch size that was tried, and for each of the run after that.
    shapes = [line for line in ours.compiles if "float32 -> " in line]
    assert len(shapes) >= len(set(ours.module.sizes)) - 1


@isolated
def test_batch_size_finder_goes_back_when_the_device_runs_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = xla_adapters.get_runtime()
    finish = runtime.tracing.finish_step
    modules: list[Any] = []

    class Remembered(Tuned):
        def __init__(self) -> None:
            super().__init__()
            modules.append(self)

    def finish_step() -> None:
        if modules[-1].sizes and modules[-1].sizes[-1] > 8:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes.")
        finish()

    monkeypatch.setattr(runtime.tracing, "finish_step", finish_step)
    run = fit(
        Remembered,
        XLAEagerStrategy(),
        data=lambda: None,
        callbacks=lambda: [BatchSizeFinder(steps_per_trial=2)],
        max_epochs=1,
    )
    assert run.module.batch_size == 8
    assert run.trainer.global_step == 64 // 8


@isolated
def test_learning_rate_finder() -> None:
    ours, plain = tuned(lambda: LearningRateFinder(min_lr=1e-4, num_training_steps=20))
    found, expected = (run.trainer.callbacks[0].optimal_lr for run in (ours, plain))
    assert found.results["lr"] == expected.results["lr"]
    assert_close(found.results["loss"], expected.results["loss"], 1e-5)
    assert ours.module.lr == plain.module.lr != 1e-2
    assert ours.counters.compiles <= 3, ours.compiles
