"""Each benchmark runs with small settings, and its table comes from what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import architectures, lightning_counts, report, step_counts, zoo

_STRATEGIES = (lightning_counts.STOCK, lightning_counts.OURS)


def _document(path: Path) -> Any:
    return json.loads(path.read_text())


def test_architectures_trains_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    command = ["--only", "gpt-2", "--steps", "2", "--at-least", "1", "--check", "--json", str(path)]
    assert architectures.main(command) == 0
    (row,) = _document(path)["results"]["rows"]
    assert (row["compiles"], row["executions_per_step"], row["transfers_per_step"], row["eager_ops"]) == (1, 1, 1, 0)
    assert row["difference"] <= 1e-5
    printed = capsys.readouterr().out
    assert f"{row['first_loss']:.4g}" in printed
    assert "1 of 1 are ok" in printed


def test_architectures_under_autocast(tmp_path: Path) -> None:
    """Attention after rotary embeddings: float32 queries and keys, bfloat16 values."""
    path = tmp_path / "a.json"
    command = ["--only", "llama", "--steps", "2", "--at-least", "1", "--bf16", "--check", "--json", str(path)]
    assert architectures.main(command) == 0
    rows = _document(path)["results"]["rows"]
    assert all(row["compiles"] == row["executions_per_step"] == 1 for row in rows)
    assert all(1e-5 < row["difference"] <= 2e-2 for row in rows)


def test_architectures_fails_the_check_and_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    command = ["--only", "wav2vec2 (ctc)", "--steps", "1", "--at-least", "1", "--check", "--json", str(path)]
    assert architectures.main(command) == 1
    (row,) = _document(path)["results"]["rows"]
    assert not row["ok"]
    # It reads the largest label on the host in its forward pass.
    assert "modeling_wav2vec2.py:" in row["reason"]
    assert row["reason"] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"compiles": 2}, "2 compiles"),
        ({"executions_per_step": 0}, "0 executions in a step"),
        ({"difference": 0.5}, "losses differ by 0.5"),
        ({"difference": None}, "losses differ by None"),
        ({"difference": float("nan")}, "losses differ by nan"),
        ({"reason": "it broke", "compiles": None}, "it broke"),
    ],
)
def test_row_is_judged_by_its_numbers(change: dict[str, Any], reason: str | None) -> None:
    good = {"compiles": 1, "executions_per_step": 1, "difference": 1e-6}
    row = architectures.Row("example", **{**good, **change})
    row.judge()
    assert row.reason == reason
    assert row.ok is (reason is None)


def test_a_name_that_is_not_in_the_zoo_lists_those_that_are() -> None:
    with pytest.raises(ValueError, match="GPT-2"):
        zoo.named("nothing like it")


@pytest.mark.slow
def test_step_counts_shows_both_trainers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.json"
    assert step_counts.main(["--models", "gpt-2", "--steps", "3", "--check", "--json", str(path)]) == 0
    crashed, stock, ours = _document(path)["results"]["runs"]
    assert "fused=True" in crashed["error"]
    assert stock["error"] is ours["error"] is None
    assert (ours["in_all"]["compiles"], ours["per_step"]["executions"]) == (1, 1)
    assert stock["per_step"]["executions"] > ours["per_step"]["executions"]
    assert stock["losses"] == pytest.approx(ours["losses"], abs=1e-5)
    assert "crashed" in capsys.readouterr().out


def test_step_counts_targets_come_from_the_runs() -> None:
    made = report.Report("step_counts")
    counts = {"compiles": 1, "executions": 2, "transfers_to_host": 0, "eager_ops": 0, "fewest_executions": 1}
    run = step_counts.Run("m", step_counts.OURS, in_all=counts, in_step=counts, logged_transfers=1)
    step_counts.add_targets(made, [run, step_counts.Run("m", step_counts.STOCK)])
    assert [target.name for target in made.targets if not target.met] == ["m: most executions in a step"]
    crashed = report.Report("step_counts")
    step_counts.add_targets(crashed, [step_counts.Run("m", step_counts.OURS, error="crashed")])
    assert not any(target.met for target in crashed.targets)


def test_lightning_counts_shows_what_an_exception_costs_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (fails,) = [scenario for scenario in lightning_counts.SCENARIOS if scenario.fails]
    monkeypatch.setattr(lightning_counts, "SCENARIOS", (fails,))
    path = tmp_path / "l.json"
    assert step_counts.main(["--lightning", "--steps", "4", "--check", "--json", str(path)]) == 0
    stock, ours = _document(path)["results"]["runs"]
    assert stock["error"] is ours["error"] is None
    assert (ours["compiles"], ours["per_step"]["executions"], ours["after_exit"]["executions"]) == (1, 1, 0)
    assert stock["after_exit"]["executions"] > 0
    assert stock["compiles"] > ours["compiles"]
    assert len(ours["losses"]) == lightning_counts.FAILS_AT
    assert stock["losses"] == pytest.approx(ours["losses"], abs=1e-5)
    assert fails.name in capsys.readouterr().out


@pytest.mark.slow
def test_lightning_counts_checks_every_scenario(tmp_path: Path) -> None:
    path = tmp_path / "l.json"
    assert step_counts.main(["--lightning", "--steps", "4", "--check", "--json", str(path)]) == 0
    runs = _document(path)["results"]["runs"]
    pairs = [(scenario.name, strategy) for scenario in lightning_counts.SCENARIOS for strategy in _STRATEGIES]
    assert [(run["scenario"], run["strategy"]) for run in runs] == pairs
    assert {run["error"] for run in runs} == {None}


def test_lightning_counts_targets_come_from_the_runs() -> None:
    scenario = lightning_counts.SCENARIOS[0]
    step = {"executions": 1, "transfers_to_host": 1, "eager_ops": 0}
    good = lightning_counts.Run(
        scenario.name, lightning_counts.OURS, compiles=1, most=step, fewest={**step, "executions": 0}, losses=[1.0, 2.0]
    )
    lightning_counts.compare(good, lightning_counts.Run(scenario.name, lightning_counts.CPU, losses=[1.0, 2.5]))
    made = report.Report("lightning_counts")
    lightning_counts.add_targets(made, [good, lightning_counts.Run(scenario.name, lightning_counts.STOCK)])
    missed = [(target.name, target.value) for target in made.targets if not target.met]
    assert missed == [
        (f"{scenario.name}: fewest executions in a step", 0),
        (f"{scenario.name}: difference to the plain CPU", 0.5),
    ]
    crashed = lightning_counts.Run(scenario.name, lightning_counts.OURS, error="ValueError: no")
    lightning_counts.compare(crashed, lightning_counts.Run(scenario.name, lightning_counts.CPU, losses=[1.0]))
    made = report.Report("lightning_counts")
    lightning_counts.add_targets(made, [crashed])
    assert made.targets
    assert not any(target.met for target in made.targets)
    assert "crashed: ValueError: no" in lightning_counts.table_of([crashed])
