"""`XLAStatsCallback` logs what the counters say, and costs nothing between two logs."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_strategy import XLAEagerStrategy, XLAStatsCallback
from tests.isolation import isolated
from tests.lightning_strategy.scenarios import BATCH, Classifier, fit
from tests.lightning_strategy.test_training import LanguageModel, token_loader

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


@isolated
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


@isolated
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


@isolated
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


@isolated
def test_counting_reads_nothing_and_changes_nothing() -> None:
    fit(Quiet, XLAEagerStrategy(), max_epochs=1)
    without = fit(Quiet, XLAEagerStrategy(), max_epochs=1)
    counted = fit(Quiet, XLAEagerStrategy(), max_epochs=1, callbacks=lambda: [XLAStatsCallback()], log_every_n_steps=1)
    assert counted.module.losses == without.module.losses
    for name in ("executions", "eager_ops", "transfers_to_host", "transfers_to_device"):
        assert getattr(counted.counters, name) == getattr(without.counters, name), name


@isolated
def test_the_device_is_waited_for_only_when_a_logger_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from xla_adapters.insight import run_record

    runtime, reads = run_record.get_runtime(), []

    class Watched:
        def metrics(self) -> Any:
            reads.append(len(reads))
            return runtime.counters.metrics()

    monkeypatch.setattr(run_record, "get_runtime", lambda: SimpleNamespace(counters=Watched()))
    options: dict[str, Any] = {"callbacks": lambda: [XLAStatsCallback()], "log_every_n_steps": 5}
    fit(Quiet, XLAEagerStrategy(), **options)
    # At the start and at the end.
    assert len(reads) == 2
    reads.clear()
    fit(Quiet, XLAEagerStrategy(), logger=CSVLogger(tmp_path), **options)
    assert len(reads) == 4


@isolated
def test_the_summary_is_printed_when_the_training_ends(capsys: pytest.CaptureFixture[str]) -> None:
    fit(Quiet, XLAEagerStrategy(), callbacks=lambda: [XLAStatsCallback()], max_epochs=1)
    lines = capsys.readouterr().err.partition("what the training cost\n")[2].splitlines()
    rows = {name.strip(): value for name, _, value in (line.strip().partition("  ") for line in lines) if value}
    assert rows["steps"].strip().startswith("6 in ")
    assert rows["compiles"].strip() == "1"
    assert rows["executions"].strip() == "6 (1.00 per step)"
    assert rows["throughput"].strip().endswith(" samples/s")
