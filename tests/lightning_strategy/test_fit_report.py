"""Where the time of a fit goes: stalls are attributed, all adds up, and nothing is executed for it."""

from __future__ import annotations

import copy
import csv
import json
import linecache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset

from lightning_strategy import XLAEagerStrategy, XLAStatsCallback
from lightning_strategy.checkpoints import XLAEagerCheckpointIO
from tests.insight import time_of_stalls
from tests.isolation import isolated
from tests.lightning_strategy.scenarios import BATCH, CLASSES, FEATURES, Classifier, fit, loader
from xla_adapters import XLAConfig
from xla_adapters.errors import ConfigError
from xla_adapters.insight.run_report import RunReport

STALL = 100.0


class SlowData(Dataset[Any]):
    def __len__(self) -> int:
        return 6 * BATCH

    def __getitem__(self, index: int) -> Any:
        if index == 3 * BATCH:
            time_of_stalls.pass_by(STALL)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(FEATURES, generator=generator), torch.tensor(index % CLASSES)


class SlowCallback(L.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            time_of_stalls.pass_by(STALL)


class SlowHook(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            time_of_stalls.pass_by(STALL)


class SlowValidation(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 0:
            time_of_stalls.pass_by(STALL)
        return super().validation_step(batch, batch_idx)


class SlowIO(XLAEagerCheckpointIO):
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        time_of_stalls.pass_by(STALL)
        super().save_checkpoint(*args, **kwargs)


def _stalled(kind: str, folder: Path) -> RunReport:
    strategy = XLAEagerStrategy(checkpoint_io=SlowIO() if kind == "saves" else None)
    options: dict[str, dict[str, Any]] = {
        "input wait": {"data": lambda: DataLoader(SlowData(), batch_size=BATCH)},
        "callbacks": {"callbacks": lambda: [SlowCallback()]},
        "hooks": {},
        "evaluation": {"validation": lambda: loader(1)},
        "saves": {"callbacks": lambda: [ModelCheckpoint(folder, every_n_train_steps=6, save_on_train_epoch_end=False)]},
    }
    make = {"hooks": SlowHook, "evaluation": SlowValidation}.get(kind, Classifier)
    fit(make, strategy, max_epochs=1, **options[kind])
    return strategy.xla_report()


@isolated
@pytest.mark.parametrize("kind", ["input wait", "callbacks", "hooks", "evaluation", "saves"])
def test_a_stall_is_attributed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    time_of_stalls.use_it(monkeypatch)
    report = _stalled(kind, tmp_path)
    assert sum(report.wall.values()) == pytest.approx(STALL)
    compiled = sum(event.seconds for event in report.compiles)
    expected = dict.fromkeys(report.wall, 0.0) | {"callbacks" if kind == "hooks" else kind: STALL, "compile": compiled}
    # The clock of the test stands still while XLA compiles, in steps of the training and of the evaluation.
    for event in report.compiles:
        expected["steps" if event.step == "train_step" else "evaluation"] -= event.seconds
    assert report.wall == pytest.approx(expected)
    assert compiled > 0
    assert report.steps["steps"] == 6


class ReadingCallback(L.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        outputs["loss"].item()  # the line that reads


class UploadingHook(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.ones(3).to(self.device)  # the line that uploads


@isolated
def test_transfers_have_their_lines() -> None:
    strategy = XLAEagerStrategy()
    fit(UploadingHook, strategy, max_epochs=1, callbacks=lambda: [ReadingCallback()])
    report = strategy.xla_report()
    for call, direction, size, mark in (
        (".item()", "to the host", 4, "# the line that reads\n"),
        ("to", "to the device", 12, "# the line that uploads\n"),
    ):
        (found,) = [item for item in report.transfers if item.call == call]
        file, _, number = found.line.rpartition(":")
        assert linecache.getline(file, int(number)).endswith(mark)
        assert (found.direction, found.count, found.bytes) == (direction, 6, 6 * size)
    assert report.transfers_looked_at == 6
    assert "# the line" not in str(report)
    assert f"{__file__}:" in str(report)


@isolated
def test_the_parts_are_all_of_the_time() -> None:
    strategy = XLAEagerStrategy()
    run = fit(Classifier, strategy, validation=loader)
    report = strategy.xla_report()
    assert report.wall_seconds <= run.counters.wall_seconds
    assert report.wall["compile"] == pytest.approx(sum(event.seconds for event in report.compiles))
    assert all(seconds > 0 for name, seconds in report.wall.items() if name != "saves")


@isolated
def test_recording_executes_and_transfers_nothing() -> None:
    # The first fit of a process does some things once.
    fit(Classifier, XLAEagerStrategy(xla_report=False), validation=loader)
    off = fit(Classifier, XLAEagerStrategy(xla_report=False), validation=loader)
    strategy = XLAEagerStrategy()
    on = fit(Classifier, strategy, validation=loader)
    assert on.module.losses == off.module.losses
    for name in ("executions", "eager_ops", "transfers_to_host", "transfers_to_device"):
        assert getattr(on.counters, name) == getattr(off.counters, name), name
    report = strategy.xla_report()
    assert (report.steps["steps"], report.rates["mfu"]) == (12, None)
    # Without a logger and a folder of its own the run has no place for files.
    assert not list(Path.cwd().glob("xla-report.html"))
    assert copy.deepcopy(strategy).xla_report().steps["steps"] == 0


@isolated
def test_loggers_get_it_with_what_the_trainer_logs(tmp_path: Path) -> None:
    options = {"log_every_n_steps": 3, "max_epochs": 1}
    alone = fit(Classifier, XLAEagerStrategy(), logger=CSVLogger(tmp_path / "alone"), **options)
    assert "xla/" not in (Path(alone.trainer.log_dir) / "metrics.csv").read_text()
    run = fit(Classifier, XLAEagerStrategy(xla_report="log"), logger=CSVLogger(tmp_path / "run"), **options)
    folder = Path(run.trainer.log_dir)
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["2", "5"]
    for row in rows:
        assert float(row["xla/seconds_per_step"]) * float(row["xla/samples_per_second"]) == pytest.approx(BATCH)
        assert 0 < float(row["xla/goodput"]) < 1
    # The graph is known from the first fit.
    assert [float(row["xla/compiles"]) for row in rows] == [0, 0]
    events = [json.loads(line)["event"] for line in (folder / "xla-events.jsonl").read_text().splitlines()]
    assert events == ["end"]
    assert "Where the time went" in (folder / "xla-report.html").read_text()


@isolated
def test_the_statistics_callback_logs_alone(tmp_path: Path) -> None:
    run = fit(
        Classifier,
        XLAEagerStrategy(xla_report="log"),
        callbacks=lambda: [XLAStatsCallback()],
        logger=CSVLogger(tmp_path),
        log_every_n_steps=3,
        max_epochs=1,
    )
    assert "xla/goodput" not in (Path(run.trainer.log_dir) / "metrics.csv").read_text()


@isolated
def test_a_fit_that_fails_has_its_page_too(tmp_path: Path) -> None:
    class Fails(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                raise ValueError("the callback failed")

    strategy = XLAEagerStrategy()
    with pytest.raises(ValueError, match="failed"):
        fit(Classifier, strategy, callbacks=lambda: [Fails()], default_root_dir=tmp_path)
    assert "ValueError: the callback failed" in (tmp_path / "xla-report.html").read_text()
    assert strategy.xla_report().about["ended by"] == "ValueError: the callback failed"


@isolated
def test_no_page_among_checkpoints(tmp_path: Path) -> None:
    callbacks = [ModelCheckpoint(tmp_path, save_last=True)]
    fit(Classifier, XLAEagerStrategy(), callbacks=lambda: callbacks, default_root_dir=tmp_path, max_epochs=1)
    assert {path.suffix for path in tmp_path.iterdir()} == {".ckpt"}


@isolated
def test_steps_that_are_no_graph_are_timed_too(tmp_path: Path) -> None:
    strategy = XLAEagerStrategy(XLAConfig(xla_mode="eager"))
    fit(Classifier, strategy, max_epochs=1)
    report = strategy.xla_report()
    assert report.steps["steps"] == 6
    assert report.wall["steps"] == max(report.wall.values())
    assert report.compiles == []


@isolated
def test_the_option_is_checked() -> None:
    with pytest.raises(ConfigError, match="xla_report=1 is not a valid value"):
        XLAEagerStrategy(xla_report=1)  # type: ignore[arg-type]
