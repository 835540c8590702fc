"""Tests of the user's may replace parts of Lightning and torch by mocks, as they do on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy

from lightning_strategy import XLAEagerStrategy
from tests.isolation import isolated
from tests.lightning_strategy.scenarios import Classifier, assert_close, fit, loader, trainer, warnings_as_list
from xla_adapters.checkpoint import CheckpointConfig
from xla_adapters.errors import GraphBreakError, LossError


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        return loss


@isolated
@pytest.mark.parametrize("make", [Classifier, Manual])
def test_a_spy_in_place_of_the_backward_of_all_strategies(make: type[Classifier]) -> None:
    module, run = make(), trainer(XLAEagerStrategy(step_replay=False), max_epochs=1)
    with mock.patch.object(Strategy, "backward", wraps=run.strategy.backward) as spy:
        run.fit(module, loader())
        # A spy on the class is seen through the object, too.
        assert run.strategy.backward.call_count == spy.call_count == 6


class ReadsInBackward(Classifier):
    def loss(self, batch: Any) -> torch.Tensor:
        loss = super().loss(batch)
        loss.register_hook(lambda grad: float(grad) * grad)
        return loss


class NoNumber(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])


@isolated
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_errors_in_the_backward_discard_the_step(micro_batches: int) -> None:
    for make, kind in ((ReadsInBackward, GraphBreakError), (NoNumber, LossError)):
        module, run = make(), trainer(XLAEagerStrategy(), max_epochs=1, accumulate_grad_batches=micro_batches)
        before = [parameter.clone() for parameter in module.parameters()]
        with pytest.raises(kind):
            run.fit(module, loader())
        assert all(map(torch.equal, before, module.parameters()))
    later = fit(Classifier, XLAEagerStrategy(), max_epochs=1)
    assert_close(later.module.losses, fit(Classifier, max_epochs=1).module.losses)


@isolated
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_mock_in_place_of_torch_save_saves_nothing(asynchronous: bool, tmp_path: Path) -> None:
    strategy = XLAEagerStrategy(checkpoint=CheckpointConfig(asynchronous=asynchronous))
    callbacks = [ModelCheckpoint(tmp_path, save_top_k=-1, save_last=True)]
    run = trainer(strategy, max_epochs=3, callbacks=callbacks)
    with mock.patch("torch.save") as save, warnings_as_list() as found:
        run.fit(Classifier(), loader())
    assert save.call_count == 6
    assert list(tmp_path.iterdir()) == []
    assert sum("torch.save was replaced, and wrote no file" in text for text in found) == 6
    run.save_checkpoint(tmp_path / "now.ckpt")
    run.strategy.checkpoint_io.teardown()
    assert "state_dict" in torch.load(tmp_path / "now.ckpt", weights_only=True)


@isolated
def test_storage_options_reach_the_parent_by_name(tmp_path: Path) -> None:
    run = trainer(XLAEagerStrategy(), max_epochs=1)
    run.fit(Classifier(), loader())
    with mock.patch.object(TorchCheckpointIO, "save_checkpoint") as save:
        run.save_checkpoint(tmp_path / "now.ckpt", storage_options="of the user")
    save.assert_called_with(mock.ANY, tmp_path / "now.ckpt", storage_options="of the user")
