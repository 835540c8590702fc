"""Where the time of a trainer's training goes: stalls are attributed, all adds up, and nothing is executed for it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.hf_trainer.scenarios import Classifier, Run, arguments, ours, vector_samples

pytestmark = pytest.mark.isolated

STEPS = 8
SCALARS = {"goodput", "input_wait", "compiles", "compile_seconds", "seconds_per_step", "samples_per_second"}


def training(folder: Path, *, data: Any = None, stock: dict[str, Any] | None = None, **options: Any) -> Run:
    args = arguments(str(folder), **{"max_steps": STEPS, "logging_steps": 4, **(stock or {})})
    return ours(Classifier(), data if data is not None else vector_samples(4 * STEPS), args=args, **options)


def test_the_logs_say_what_the_time_since_the_last_one_went_to(tmp_path: Path) -> None:
    stock = {"eval_strategy": "steps", "eval_steps": 4}
    run = training(tmp_path / "run", stock={**stock, "report_to": ["tensorboard"]}, eval_dataset=vector_samples(4))
    entries = [entry for entry in run.trainer.state.log_history if "loss" in entry]
    assert [{name for name in entry if name.startswith("xla/")} for entry in entries] == [
        {f"xla/{name}" for name in SCALARS}
    ] * 2
    assert [entry["xla/compiles"] for entry in entries] == [1, 1]
    for entry in entries:
        assert 0 < entry["xla/goodput"] < 1
        assert entry["xla/seconds_per_step"] * entry["xla/samples_per_second"] == pytest.approx(4, rel=1e-2)
    assert not any(
        name.startswith("xla/") for entry in run.trainer.state.log_history if "loss" not in entry for name in entry
    )
    alone = training(tmp_path / "alone", stock=stock, eval_dataset=vector_samples(4))
    assert not any(name.startswith("xla/") for entry in alone.trainer.state.log_history for name in entry)


def test_the_files_have_the_events_and_the_page(tmp_path: Path) -> None:
    run = training(tmp_path, stock={"save_strategy": "steps", "save_steps": 4})
    lines = [json.loads(line) for line in (tmp_path / "xla-events.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["compile", "save", "save", "end"]
    assert lines[0]["graph"]["hash"] == run.trainer.xla_report().compiles[0].graph.hash
    assert lines[-1]["steps"]["steps"] == STEPS
    assert [save["step"] for save in lines[-1]["checkpoints"]] == [4, 8]
    page = (tmp_path / "xla-report.html").read_text()
    assert len(page) < 200_000
    assert page.count("<svg") == 4
    assert "prefers-color-scheme: dark" in page
    # Nothing is loaded from elsewhere.
    assert not re.findall(r'(?:src|href)="(?!#)|<script|@import|url\(', page)
    for text in ("Where the time went", "first call of the phase &#39;update&#39;", "checkpoint-4", "Classifier"):
        assert text in page


def test_without_pygal_the_page_has_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from xla_adapters.insight import run_report

    monkeypatch.setattr(run_report, "find_spec", lambda name: None)
    training(tmp_path)
    page = (tmp_path / "xla-report.html").read_text()
    assert "<svg" not in page
    assert "pip install &#34;xla-adapters[report]&#34;" in page
    assert "Where the time went" in page


def test_a_recompile_is_in_the_report(tmp_path: Path) -> None:
    run = training(tmp_path, data=vector_samples(4 * STEPS - 2), stock={"num_train_epochs": 2, "max_steps": -1})
    report = run.trainer.xla_report()
    assert len(report.compiles) == run.counts.compiles == 2
    assert "(4, 4) float32 -> (2, 4) float32" in str(report)
    assert report.rates["mfu"] is None
    assert report.programs[0].replays > 0
