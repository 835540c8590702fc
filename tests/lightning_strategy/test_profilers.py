"""Lightning's profilers: their scopes are inside and around steps, and cost no compile and no execution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, SimpleProfiler, XLAProfiler

from lightning_strategy import XLAEagerStrategy
from tests.isolation import isolated
from tests.lightning_strategy.scenarios import Classifier, assert_close, fit


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss}


# For each loop the module, options of the Trainer, and the number of graphs.
_LOOPS: dict[str, tuple[type[Classifier], dict[str, Any], int]] = {
    "plain": (Classifier, {}, 1),
    "accumulating": (Classifier, {"accumulate_grad_batches": 2}, 2),
    "manual": (Manual, {}, 1),
}


def profiled(loop: str, profiler: Profiler) -> Any:
    """Fits with a profiler, with the losses of the CPU and the number of executions of a fit without a profiler."""
    make, options, graphs = _LOOPS[loop]
    ours = fit(make, XLAEagerStrategy(), max_epochs=1, profiler=profiler, **options)
    plain = fit(make, None, max_epochs=1, **options)
    assert_close(ours.module.losses, plain.module.losses)
    assert ours.counters.compiles == graphs, ours.compiles
    assert ours.counters.executions == 6
    return ours


@isolated
@pytest.mark.parametrize("loop", sorted(_LOOPS))
def test_simple_profiler_times_every_batch(loop: str) -> None:
    profiler = SimpleProfiler()
    profiled(loop, profiler)
    assert len(profiler.recorded_durations["run_training_batch"]) == 6
    assert len(profiler.recorded_durations["[Strategy]XLAEagerStrategy.training_step"]) == 6


@isolated
@pytest.mark.parametrize("loop", sorted(_LOOPS))
def test_advanced_profiler_reports_the_training_step(loop: str, tmp_path: Path) -> None:
    profiled(loop, AdvancedProfiler(dirpath=tmp_path, filename="report"))
    (report,) = tmp_path.iterdir()
    assert "Profile stats for: [Strategy]XLAEagerStrategy.training_step" in report.read_text()


@isolated
@pytest.mark.parametrize("loop", sorted(_LOOPS))
def test_xla_profiler_traces_the_training_step(loop: str) -> None:
    # The system chooses a port that is free.
    profiler = XLAProfiler(port=0)
    profiled(loop, profiler)
    assert profiler._start_trace
    assert not profiler._recording_map
