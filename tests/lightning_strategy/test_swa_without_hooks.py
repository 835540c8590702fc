"""`StochasticWeightAveraging` of a model with batch norms, where no user code looks at gradients."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn

from lightning_strategy import XLAEagerStrategy
from tests.lightning_strategy.scenarios import CLASSES, FEATURES, loader, trainer


class _Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _trained(strategy: Any) -> list[torch.Tensor]:
    module = _Net()
    average = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=1)
    trainer(strategy, max_epochs=4, callbacks=[average]).fit(module, loader(4))
    return [value.detach().cpu().float() for value in module.state_dict().values()]


def test_the_update_after_its_last_epoch_has_the_gradients_of_the_batch_before() -> None:
    expected = _trained(None)
    for one, other in zip(_trained(XLAEagerStrategy()), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
