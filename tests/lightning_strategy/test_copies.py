"""Copies of trainers and strategies, and the tuner, which makes some."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder, ModelCheckpoint

import xla_adapters
from lightning_strategy import XLAEagerFabricStrategy, XLAEagerStrategy
from tests.isolation import isolated
from tests.lightning_strategy.scenarios import (
    CLASSES,
    Classifier,
    Outcome,
    WithoutBatchNorm,
    assert_close,
    fit,
    loader,
    trainer,
)
from xla_adapters import get_runtime

pytestmark = pytest.mark.isolated


class Measured(Classifier):
    def __init__(self) -> None:
        super().__init__(optimizer=adamw)
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("accuracy", self.accuracy, on_epoch=True)
        return super().training_step(batch, batch_idx)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def pickled(value: Any) -> Any:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


COPIERS = {"deepcopy": copy.deepcopy, "pickle": lambda value: pickle.loads(pickle.dumps(value)), "torch.save": pickled}


class Copies(L.Callback):
    """Copies everything in the hooks between steps."""

    def __init__(self, copier: str) -> None:
        self.copier = copier
        self.made: list[Any] = []

    def _copy(self, trainer: Any, module: Any, *args: Any) -> None:
        made, self.made = self.made, []
        made.append(COPIERS[self.copier]((trainer, trainer.callbacks, module)))
        self.made = made[-1:]

    on_train_start = on_train_batch_end = on_validation_end = on_train_epoch_end = on_fit_end = _copy


@pytest.mark.parametrize("copier", ["deepcopy", "pickle", pytest.param("torch.save", marks=pytest.mark.slow)])
def test_in_callbacks(copier: str) -> None:
    ours = fit(Measured, XLAEagerStrategy(), validation=loader, callbacks=lambda: [Copies(copier)], max_epochs=2)
    assert_close(ours.module.losses, fit(Measured, max_epochs=2).module.losses)
    run, callbacks, module = ours.trainer.callbacks[0].made[-1]
    assert [type(callback) for callback in callbacks] == [Copies]
    for name, value in ours.module.state_dict().items():
        assert torch.equal(value, module.state_dict()[name].cpu()), name
    # The copy is independent: what it updates is its own.
    module.accuracy.cpu().update(torch.eye(CLASSES), torch.arange(CLASSES))
    assert ours.module.accuracy._update_count != module.accuracy._update_count
    run.fit_loop.max_epochs = 3
    run.fit(Measured(), loader())
    assert run.global_step == 18
    assert ours.trainer.global_step == 12


def test_before_and_after_a_fit(tmp_path: Any) -> None:
    saves = ModelCheckpoint(tmp_path)
    run = trainer(XLAEagerStrategy(), max_epochs=1, callbacks=[saves])
    before = [copier(run) for copier in COPIERS.values()]
    run.fit(Measured(), loader(2))
    after = [copier(run) for copier in COPIERS.values()]
    for other in before:
        other.fit(Measured(), loader(2))
        assert other.global_step == 2
    for other in after:
        other.fit_loop.max_epochs = 2
        other.fit(Measured(), loader(2))
        assert other.global_step == 4
    assert run.global_step == 2


@isolated(env={"CPU_NUM_DEVICES": "2"})
def test_a_strategy_that_shards() -> None:
    run = trainer(XLAEagerStrategy(sharding="fsdp"), max_epochs=1)
    copies: list[Callable[[], Any]] = [lambda: copy.deepcopy(run), lambda: pickle.loads(pickle.dumps(run))]
    for make in copies:
        other = make()
        other.fit(Measured(), loader(2))
        assert other.strategy.sharding_plan is not None
    run.fit(Measured(), loader(2))
    other = copy.deepcopy(run)
    other.fit_loop.max_epochs = 2
    other.fit(Measured(), loader(2))


def test_what_refers_to_the_runtime() -> None:
    runtime = get_runtime()
    assert copy.deepcopy(runtime) is runtime
    assert pickle.loads(pickle.dumps(runtime)) is runtime
    strategy = copy.deepcopy(XLAEagerFabricStrategy())
    assert L.Fabric(strategy=strategy).device.type == "xla"


# ---- tuner ------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("mode", ["power", pytest.param("binsearch", marks=pytest.mark.slow)])
def test_batch_size_finder(mode: str) -> None:
    ours, plain = tuned(lambda: BatchSizeFinder(mode=mode, steps_per_trial=2, max_trials=3))
    assert ours.module.batch_size == plain.module.batch_size > 2
    # A graph for each batch size that was tried, and for each of the run after that.
    shapes = [line for line in ours.compiles if "float32 -> " in line]
    assert len(shapes) >= len(set(ours.module.sizes)) - 1


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


def test_learning_rate_finder() -> None:
    ours, plain = tuned(lambda: LearningRateFinder(min_lr=1e-4, num_training_steps=20))
    found, expected = (run.trainer.callbacks[0].optimal_lr for run in (ours, plain))
    assert found.results["lr"] == expected.results["lr"]
    assert_close(found.results["loss"], expected.results["loss"], 1e-5)
    assert ours.module.lr == plain.module.lr != 1e-2
    assert ours.counters.compiles <= 3, ours.compiles
