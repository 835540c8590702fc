"""`initialize(fast_compile=True)` under Lightning: layers are compiled once, the training is the same."""

from __future__ import annotations

import functools

import pytest
from torch import nn

import xla_adapters
from lightning_strategy import XLAEagerStrategy
from tests.isolation import run_in_child
from tests.lightning_strategy.scenarios import CLASSES, FEATURES, Classifier, fit


class _Deep(Classifier):
    def __init__(self) -> None:
        super().__init__()
        layers = [
            nn.TransformerEncoderLayer(FEATURES, 2, 16, dropout=0.1, activation="gelu", batch_first=True)
            for _ in range(6)
        ]
        self.net = nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES))


def _fit(fast: bool) -> tuple[list[float], int, int, int]:
    xla_adapters.initialize(fast_compile=fast)
    # Graphs that are compiled in blocks are counted separately.
    run = fit(_Deep, XLAEagerStrategy(), gradient_clip_val=1.0)
    in_blocks = len(xla_adapters.get_runtime().executables._calls)  # type: ignore[attr-defined]
    return run.module.losses, run.counters.compiles, run.counters.executions, in_blocks


@pytest.mark.slow
def test_the_same_training_in_one_graph() -> None:
    usual, fast = (run_in_child(functools.partial(_fit, fast)) for fast in (False, True))
    assert fast[1:3] == usual[1:3]
    assert (usual[3], fast[3]) == (0, 1)
    assert fast[0] == pytest.approx(usual[0], rel=1e-4)
