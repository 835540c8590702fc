"""A Trainer, its callbacks and its module can be pickled and copied, whenever they can on the CPU."""

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
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_strategy import XLAEagerFabricStrategy, XLAEagerStrategy
from tests.isolation import isolated
from tests.lightning_strategy.scenarios import CLASSES, Classifier, assert_close, fit, loader, trainer
from xla_adapters import get_runtime


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


@isolated
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


@isolated
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


@isolated
def test_what_refers_to_the_runtime() -> None:
    runtime = get_runtime()
    assert copy.deepcopy(runtime) is runtime
    assert pickle.loads(pickle.dumps(runtime)) is runtime
    strategy = copy.deepcopy(XLAEagerFabricStrategy())
    assert L.Fabric(strategy=strategy).device.type == "xla"
