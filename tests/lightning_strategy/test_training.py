"""Training: every row with its counts, and the losses of the plain CPU."""

from __future__ import annotations

from tests.isolation import isolated
from tests.lightning_strategy.scenarios import Classifier, fit_both


@isolated
def test_automatic_optimization() -> None:
    ours, _ = fit_both(Classifier)
    assert ours.counters.compiles == 1
    assert ours.counters.executions == 12  # batches
