"""The run report and the statistics of a fit."""

from __future__ import annotations

import copy
import csv
import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_strategy import XLAEagerStrategy, XLAStatsCallback
from tests.lightning_strategy.scenarios import BATCH, Classifier, fit
from tests.lightning_strategy.test_training import LanguageModel, token_loader
from xla_adapters import XLAConfig

pytestmark = pytest.mark.isolated


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


def test_no_page_among_checkpoints(tmp_path: Path) -> None:
    callbacks = [ModelCheckpoint(tmp_path, save_last=True)]
    fit(Classifier, XLAEagerStrategy(), callbacks=lambda: callbacks, default_root_dir=tmp_path, max_epochs=1)
    assert {path.suffix for path in tmp_path.iterdir()} == {".ckpt"}
    # Nor in a folder for something else, where neither logs nor checkpoints go; below it they do.
    other = tmp_path / "other"
    fit(Classifier, XLAEagerStrategy(), callbacks=lambda: callbacks, default_root_dir=other, max_epochs=1)
    fit(Classifier, XLAEagerStrategy(), default_root_dir=other, max_epochs=1)
    assert not other.exists()
    below = [ModelCheckpoint(other / "checkpoints")]
    fit(Classifier, XLAEagerStrategy(), callbacks=lambda: below, default_root_dir=other, max_epochs=1)
    assert (other / "xla-report.html").is_file()
    # Without a logger and a folder of its own the run has no place for files.
    strategy = XLAEagerStrategy()
    fit(Classifier, strategy, max_epochs=1)
    assert not list(Path.cwd().glob("xla-report.html"))
    assert strategy.xla_report().steps["steps"] == 6
    assert copy.deepcopy(strategy).xla_report().steps["steps"] == 0


def test_steps_that_are_no_graph_are_timed_too(tmp_path: Path) -> None:
    strategy = XLAEagerStrategy(XLAConfig(xla_mode="eager"))
    fit(Classifier, strategy, max_epochs=1)
    report = strategy.xla_report()
    assert report.steps["steps"] == 6
    assert report.wall["steps"] == max(report.wall.values())
    assert report.compiles == []


# ---- statistics -------------------------------------------------------------------------------------


COUNTS = ("xla/compiles", "xla/executions", "xla/executions_per_step")


class Quiet(Classifier):
    """Logs nothing, so that the loggers have only the callback's values."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


def logged(run: Any) -> list[dict[str, float]]:
    """The rows of the CSV file."""
    with (Path(run.trainer.logger.log_dir) / "metrics.csv").open() as stream:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(stream)]


def counts(rows: list[dict[str, float]]) -> list[tuple[float, ...]]:
    return [(row["step"], *(row[name] for name in COUNTS)) for row in rows]


def test_loggers_get_the_numbers_of_the_steps_since_the_last_time(tmp_path: Path) -> None:
    found: list[XLAStatsCallback] = []

    def callbacks() -> list[Any]:
        found.append(XLAStatsCallback())
        return [found[-1]]

    run = fit(
        Quiet, XLAEagerStrategy(), callbacks=callbacks, logger=CSVLogger(tmp_path), log_every_n_steps=4, max_epochs=2
    )
    rows = logged(run)
    assert counts(rows) == [(4, 1, 4, 1), (8, 0, 4, 1), (12, 0, 4, 1)]
    for row in rows:
        assert row["xla/seconds_per_step"] * row["xla/samples_per_second"] == pytest.approx(BATCH)
    stats = found[0].stats
    assert (stats.steps, stats.samples, stats.tokens) == (12, 12 * BATCH, 0)
    assert stats.as_dict()["executions"] == run.counters.executions == 12
    assert stats.as_dict()["compiles"] == run.counters.compiles == 1


def test_tokens_are_counted_where_the_batch_names_them(tmp_path: Path) -> None:
    run = fit(
        LanguageModel,
        XLAEagerStrategy(),
        data=token_loader,
        callbacks=lambda: [XLAStatsCallback()],
        logger=CSVLogger(tmp_path),
        log_every_n_steps=4,
    )
    rows = logged(run)
    assert counts(rows) == [(4, 1, 4, 1), (8, 0, 4, 1)]
    for row in rows:
        assert row["xla/seconds_per_step"] * row["xla/tokens_per_second"] == pytest.approx(4 * 12)
        assert "xla/samples_per_second" not in row


@pytest.mark.parametrize(("accumulation", "per_step"), [("per_micro_batch", 2), ("unrolled", 1)])
def test_under_accumulation_a_step_is_an_update(accumulation: Any, per_step: int, tmp_path: Path) -> None:
    run = fit(
        Quiet,
        XLAEagerStrategy(accumulation=accumulation),
        callbacks=lambda: [XLAStatsCallback()],
        logger=CSVLogger(tmp_path),
        log_every_n_steps=3,
        accumulate_grad_batches=2,
    )
    rows = logged(run)
    compiles = per_step
    assert counts(rows) == [(3, compiles, 3 * per_step, per_step), (6, 0, 3 * per_step, per_step)]
    for row in rows:
        assert row["xla/seconds_per_step"] * row["xla/samples_per_second"] == pytest.approx(2 * BATCH)


def test_counting_reads_nothing_and_changes_nothing() -> None:
    fit(Quiet, XLAEagerStrategy(), max_epochs=1)
    without = fit(Quiet, XLAEagerStrategy(), max_epochs=1)
    counted = fit(Quiet, XLAEagerStrategy(), max_epochs=1, callbacks=lambda: [XLAStatsCallback()], log_every_n_steps=1)
    assert counted.module.losses == without.module.losses
    for name in ("executions", "eager_ops", "transfers_to_host", "transfers_to_device"):
        assert getattr(counted.counters, name) == getattr(without.counters, name), name


def test_the_device_is_waited_for_only_when_a_logger_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from xla_adapters.insight import run_record

    runtime, reads = run_record.get_runtime(), []

    class Watched:
        def metrics(self) -> Any:
            reads.append(len(reads))
            return runtime.counters.metrics()

        def __getattr__(self, name: str) -> Any:
            return getattr(runtime.counters, name)

    class WatchedRuntime:
        counters = Watched()

        def __getattr__(self, name: str) -> Any:
            return getattr(runtime, name)

    monkeypatch.setattr(run_record, "get_runtime", WatchedRuntime)
    options: dict[str, Any] = {"callbacks": lambda: [XLAStatsCallback()], "log_every_n_steps": 5}
    fit(Quiet, XLAEagerStrategy(), **options)
    # At the start and at the end, of the callback and of the report.
    assert len(reads) == 4
    reads.clear()
    fit(Quiet, XLAEagerStrategy(), logger=CSVLogger(tmp_path), **options)
    assert len(reads) == 6


def test_the_summary_is_printed_when_the_training_ends(capsys: pytest.CaptureFixture[str]) -> None:
    fit(Quiet, XLAEagerStrategy(), callbacks=lambda: [XLAStatsCallback()], max_epochs=1)
    lines = capsys.readouterr().err.partition("what the training cost\n")[2].splitlines()
    rows = {name.strip(): value for name, _, value in (line.strip().partition("  ") for line in lines) if value}
    assert rows["steps"].strip().startswith("6 in ")
    assert rows["compiles"].strip() == "1"
    assert rows["executions"].strip() == "6 (1.00 per step)"
    assert rows["throughput"].strip().endswith(" samples/s")
