"""Lightning's callbacks and loggers: what they do on the CPU, without a compile, and reads only where one is due."""

from __future__ import annotations

import csv
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from torch import nn

from lightning_strategy import XLAEagerStrategy
from tests.isolation import isolated
from tests.lightning_strategy.scenarios import Classifier, Outcome, assert_close, fit, fit_both, loader
from xla_adapters.errors import TensorReadError


class Shown(Classifier):
    """Logs two values for the bar."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        self.log("twice", 2 * loss, prog_bar=True)
        return loss


class WithoutBatchNorm(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net[1] = nn.Identity()


def assert_same_weights(ours: Outcome, plain: Outcome) -> None:
    theirs = plain.module.state_dict()
    for name, value in ours.module.state_dict().items():
        torch.testing.assert_close(
            value, theirs[name], atol=2e-6, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_counts(run: Outcome, *, compiles: int = 1, executions: int = 12) -> None:
    assert (run.counters.compiles, run.counters.executions) == (compiles, executions), run.compiles


def more_transfers(**options: Callable[[], Any]) -> int:
    """How many more transfers to the host 12 batches cost than 6; options are made anew for each fit."""
    counts = [
        fit(
            Shown,
            XLAEagerStrategy(),
            data=lambda batches=batches: loader(batches),  # type: ignore[misc]
            max_epochs=1,
            **{name: make() if name != "callbacks" else make for name, make in options.items()},  # type: ignore[arg-type]
        ).counters.transfers_to_host
        for batches in (6, 12)
    ]
    return counts[1] - counts[0]


def logged(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


# ---- saving and stopping ------------------------------------------------------------------------


@isolated
def test_model_checkpoint_keeps_the_same_best_files_and_the_last(tmp_path: Path) -> None:
    folders = iter([tmp_path / "xla", tmp_path / "cpu"])

    def callbacks() -> list[Any]:
        return [
            ModelCheckpoint(
                next(folders), "{step}", monitor="loss", save_top_k=2, save_last=True, every_n_train_steps=2
            )
        ]

    ours, plain = fit_both(Classifier, callbacks=callbacks)
    assert_counts(ours)
    names = [sorted(path.name for path in (tmp_path / side).iterdir()) for side in ("xla", "cpu")]
    assert names[0] == names[1]
    assert len(names[0]) == 3
    mine, theirs = ours.trainer.checkpoint_callback, plain.trainer.checkpoint_callback
    assert Path(mine.best_model_path).name == Path(theirs.best_model_path).name
    assert_close([float(mine.best_model_score)], [float(theirs.best_model_score)])


@isolated
def test_early_stopping_stops_after_the_same_epoch() -> None:
    ours, plain = fit_both(
        Classifier,
        validation=loader,
        max_epochs=6,
        callbacks=lambda: [EarlyStopping("val_loss", patience=0, min_delta=0.5)],
    )
    assert ours.trainer.early_stopping_callback.stopped_epoch == 1
    assert plain.trainer.early_stopping_callback.stopped_epoch == 1
    assert_counts(ours, compiles=2, executions=24)


@isolated
def test_max_time_ends_the_run_between_steps() -> None:
    in_time, _ = fit_both(Classifier, max_epochs=1, max_time=timedelta(hours=1))
    assert_counts(in_time, executions=6)
    too_late = fit(Classifier, XLAEagerStrategy(), max_time={"seconds": 0})
    assert_counts(too_late, compiles=0, executions=0)


# ---- averages of weights ------------------------------------------------------------------------


@isolated
def test_stochastic_weight_averaging() -> None:
    ours, plain = fit_both(
        WithoutBatchNorm,
        max_epochs=4,
        callbacks=lambda: [StochasticWeightAveraging(swa_lrs=5e-3, swa_epoch_start=1, annealing_epochs=1)],
    )
    assert_same_weights(ours, plain)
    assert_counts(ours, executions=24)


@isolated
def test_stochastic_weight_averaging_with_batch_norm_raises_where_torch_reads_a_counter() -> None:
    with pytest.raises(TensorReadError, match="on_graph_break='warn'"):
        fit(Classifier, XLAEagerStrategy(), callbacks=lambda: [StochasticWeightAveraging(1e-2, swa_epoch_start=1)])


@isolated
@pytest.mark.parametrize("average", [lambda: EMAWeightAveraging(decay=0.5), WeightAveraging], ids=["EMA", "mean"])
def test_weight_averaging(average: Callable[[], Any]) -> None:
    ours, plain = fit_both(Classifier, validation=loader, callbacks=lambda: [average()])
    assert_same_weights(ours, plain)
    name = "val_loss"
    assert_close([float(ours.trainer.callback_metrics[name])], [float(plain.trainer.callback_metrics[name])])
    assert ours.counters.executions == 24


# ---- monitors, bars and loggers -----------------------------------------------------------------


@isolated
def test_monitors_cost_no_transfer_of_their_own(tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [LearningRateMonitor(), DeviceStatsMonitor()]

    due = more_transfers(logger=lambda: CSVLogger(tmp_path), log_every_n_steps=lambda: 3, callbacks=lambda: callbacks())
    assert due == 2


@isolated
@pytest.mark.parametrize(("refresh_rate", "due"), [(1, 6), (3, 2), (100, 0)])
def test_progress_bar_costs_one_transfer_per_redraw(refresh_rate: int, due: int) -> None:
    assert more_transfers(enable_progress_bar=lambda: True, callbacks=lambda: [TQDMProgressBar(refresh_rate)]) == due


@isolated
@pytest.mark.parametrize(("every", "due"), [(3, 2), (100, 0)])
def test_all_loggers_together_cost_one_transfer_when_due(every: int, due: int, tmp_path: Path) -> None:
    def loggers() -> list[Logger]:
        return [CSVLogger(tmp_path), TensorBoardLogger(tmp_path)]

    assert more_transfers(logger=loggers, log_every_n_steps=lambda: every) == due


@isolated
@pytest.mark.parametrize(("refresh_rate", "due"), [(1, 6), (3, 2)])
def test_bar_and_loggers_share_a_transfer(refresh_rate: int, due: int, tmp_path: Path) -> None:
    shared = more_transfers(
        logger=lambda: [CSVLogger(tmp_path), TensorBoardLogger(tmp_path)],
        log_every_n_steps=lambda: 3,
        enable_progress_bar=lambda: True,
        callbacks=lambda: [TQDMProgressBar(refresh_rate)],
    )
    assert shared == due


@isolated
def test_loggers_write_the_values_of_the_cpu(tmp_path: Path) -> None:
    written = []
    for side, strategy in (("xla", XLAEagerStrategy()), ("cpu", None)):
        fit(Shown, strategy, logger=CSVLogger(tmp_path, version=side), log_every_n_steps=2)
        rows = logged(tmp_path / "lightning_logs" / side)
        written.append([(int(row["step"]), float(row["loss"]), float(row["twice"])) for row in rows])
    ours, plain = written
    assert [row[0] for row in ours] == [row[0] for row in plain] == [1, 3, 5, 7, 9, 11]
    assert_close([value for row in ours for value in row[1:]], [value for row in plain for value in row[1:]], 4e-6)
