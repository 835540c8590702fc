"""Each benchmark runs with small settings, and its table comes from what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import lightning_counts, report, step_counts, zoo

_STRATEGIES = (lightning_counts.STOCK, lightning_counts.OURS)


def _document(path: Path) -> Any:
    return json.loads(path.read_text())


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
    assert (ours["compiles"], ours["per_step"]["executions"]) == (1, 1)
    assert stock["per_step"]["executions"] > ours["per_step"]["executions"]
    assert stock["losses"] == pytest.approx(ours["losses"], abs=1e-5)
    assert "crashed" in capsys.readouterr().out


def test_step_counts_targets_come_from_the_runs() -> None:
    run = step_counts.Run("m", step_counts.OURS, compiles=1, logged_transfers=1)
    step = {"compiles": 0, "executions": 1, "transfers_to_host": 0, "eager_ops": 0}
    run.take([step, {**step, "executions": 2}])
    assert run.per_step["executions"] == 1.5
    made = report.Report("step_counts")
    step_counts.add_targets(made, run)
    assert [target.name for target in made.targets if not target.met] == ["m: most executions in a step"]
    crashed = report.Report("step_counts")
    step_counts.add_targets(crashed, step_counts.Run("m", step_counts.OURS, error="crashed"))
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
    assert [(run["what"], run["trainer"]) for run in runs] == pairs
    assert {run["error"] for run in runs} == {None}


def test_lightning_counts_targets_come_from_the_runs() -> None:
    scenario = lightning_counts.SCENARIOS[0]
    step = {"executions": 1, "transfers_to_host": 1, "eager_ops": 0}
    good = step_counts.Run(
        *(scenario.name, lightning_counts.OURS, 1),
        most=step,
        fewest={**step, "executions": 0},
        logged_transfers=1,
        losses=[1.0, 2.0],
    )
    lightning_counts.compare(good, step_counts.Run(scenario.name, lightning_counts.CPU, losses=[1.0, 2.5]))
    made = report.Report("lightning_counts")
    lightning_counts.add_all_targets(made, [good, step_counts.Run(scenario.name, lightning_counts.STOCK)])
    missed = [(target.name, target.value) for target in made.targets if not target.met]
    assert missed == [
        (f"{scenario.name}: fewest executions in a step", 0),
        (f"{scenario.name}: difference to the plain CPU", 0.5),
    ]
    crashed = step_counts.Run(scenario.name, lightning_counts.OURS, error="ValueError: no")
    lightning_counts.compare(crashed, step_counts.Run(scenario.name, lightning_counts.CPU, losses=[1.0]))
    made = report.Report("lightning_counts")
    lightning_counts.add_all_targets(made, [crashed])
    assert made.targets
    assert not any(target.met for target in made.targets)
    assert "crashed: ValueError: no" in step_counts.table_of([crashed], "scenario")
