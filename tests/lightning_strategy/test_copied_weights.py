"""Callbacks that keep copies of the weights and load them again."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch

from lightning_strategy import XLAEagerStrategy
from tests.isolation import isolated
from tests.lightning_strategy.scenarios import Classifier, WithoutBatchNorm, assert_close, fit, loader
from tests.replay.averages import WAYS, Averages, counting_looks
from xla_adapters import XLAConfig


class _Callback(L.Callback):
    averages: Averages

    def __init__(self, way: str) -> None:
        self.way = way

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.averages = Averages(pl_module, self.way)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.averages.batch_ended(trainer.global_step - 1)


def _fit(way: str, optimizer: Any, strategy: Any, make: Any = WithoutBatchNorm) -> tuple[Any, _Callback]:
    callback = _Callback(way)

    def module() -> Any:
        made = make()
        made.make_optimizer = optimizer
        return made

    run = fit(
        module,
        strategy,
        data=partial(loader, 5),
        validation=partial(loader, 2, seed=1),
        callbacks=lambda: [callback],
        max_epochs=2,
    )
    return run, callback


@pytest.mark.parametrize(
    "way", [way if way in ("copy_", "AveragedModel") else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]
)
@isolated
def test_weights_that_callbacks_put_back_train_as_on_the_host(way: str) -> None:
    optimizers = (partial(torch.optim.AdamW, lr=1e-2), partial(torch.optim.SGD, lr=0.1))
    for optimizer in optimizers:
        expected, plain = _fit(way, optimizer, None)
        for replay in ("auto", False):
            run, mine = _fit(way, optimizer, XLAEagerStrategy(XLAConfig(step_replay=replay)))
            assert_close(run.module.losses, expected.module.losses, 1e-5)
            assert_close(mine.averages.values(), plain.averages.values(), 2e-5)


@pytest.mark.parametrize("replay", ["auto", False])
@isolated
def test_the_usual_loop_looks_at_the_state_once(replay: Any) -> None:
    """Weight averaging, logging and validation make no copies of the weights."""
    with counting_looks() as looks:
        _fit("", partial(torch.optim.AdamW, lr=1e-2), XLAEagerStrategy(XLAConfig(step_replay=replay)), Classifier)
    assert looks["first"].call_count <= 1
    assert looks["live"].call_count <= 3
    assert looks["copies"].call_count <= 4
    assert looks["state"].call_count <= 7
