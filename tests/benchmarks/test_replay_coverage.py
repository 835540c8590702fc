"""The table of replayed programs comes from runs in children, and a run that differs is reported as not correct."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import replay_coverage, report
from tests import programs
from tests.programs.program import Program, Ran

_LOOP, _LIGHTNING = programs.named("loop-mlp,autoencoder")


def _one_bit_off(step_replay: Any) -> Ran:
    ran = _LOOP.run(step_replay)
    if step_replay == "auto":
        bits = next(iter(ran.weights.values())).reshape(-1).view(np.int32)
        bits[-1] ^= 1
    return ran


def _crashes_when_replayed(step_replay: Any) -> Ran:
    if step_replay == "auto":
        raise ValueError("the program broke")
    return _LOOP.run(step_replay)


def _use(monkeypatch: pytest.MonkeyPatch, *programs: Program) -> None:
    monkeypatch.setattr(replay_coverage, "named", lambda names: list(programs))


def test_two_programs_are_replayed_and_correct(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.json"
    command = ["--programs", "loop-mlp,autoencoder", "--at-least", "2", "--check", "--json", str(path)]
    assert replay_coverage.main(command) == 0
    rows = json.loads(path.read_text())["results"]["rows"]
    assert [(row["name"], row["kind"]) for row in rows] == [("loop-mlp", "own loop"), ("autoencoder", "Lightning")]
    for row in rows:
        assert row["covered"]
        assert row["correct"]
        assert row["steps"] == 16
        assert row["replays"] >= 10
    assert "2 of 2 are covered, 2 are correct" in capsys.readouterr().out


def test_a_run_that_differs_in_one_bit_is_not_correct(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _use(monkeypatch, replace(_LOOP, run=_one_bit_off))
    assert replay_coverage.main(["--check"]) == 1
    printed = capsys.readouterr().out
    assert "1 of 1 are covered, 0 are correct" in printed
    assert "loop-mlp: 0.weight differs at the end by up to" in printed


def test_a_crash_is_a_row_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _use(monkeypatch, replace(_LIGHTNING, run=_crashes_when_replayed), _LOOP)
    assert replay_coverage.main(["--check"]) == 1
    printed = capsys.readouterr().out
    assert "autoencoder: auto: ValueError: the program broke" in printed
    assert "1 of 2 are covered, 1 are correct" in printed


def _ran(**changes: Any) -> Ran:
    values: dict[str, Any] = {
        "steps": 2,
        "replays": 1,
        "reasons": {},
        "logged": [{"loss": 1.0}, {"loss": 0.5}],
        "weights": {"weight": np.array([1.0, 2.0], np.float32)},
    }
    return Ran(**{**values, **changes})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, None),
        ({"steps": 3}, "2 steps traced, 3 under auto"),
        ({"logged": [{"loss": 1.0}]}, "2 log entries traced, 1 under auto"),
        ({"logged": [{"loss": 1.0}, {"other_loss": 0.5}]}, "log entry 1 holds"),
        ({"logged": [{"loss": 1.0}, {"loss": 0.5 + 1e-15}]}, "log entry 1: loss is 0.5 traced"),
        ({"weights": {"other": np.zeros(2)}}, "weights ['weight'] traced, ['other'] under auto"),
        ({"weights": {"weight": np.array([1.0, 2.0])}}, "float64"),
        ({"weights": {"weight": np.array([1.0, 2.5], np.float32)}}, "weight differs at the end by up to 0.5"),
    ],
)
def test_what_differs_is_said(change: dict[str, Any], says: str | None) -> None:
    found = replay_coverage.difference(_ran(replays=0), _ran(**change))
    assert found is None if says is None else says in str(found)


def test_runs_that_cannot_be_compared_are_not_equal() -> None:
    same = replay_coverage.difference
    assert same(_ran(replays=1), _ran()) == "step_replay=False replayed 1 steps"
    silent = {"logged": []}
    assert same(_ran(replays=0, **silent), _ran(**silent)) == "only 0 losses were logged in 2 steps"
    broken = {"logged": [{"loss": float("nan")}]}
    assert same(_ran(replays=0, **broken), _ran(**broken)) == "log entry 0: loss is nan traced, nan under auto"
    without = {"weights": {}}
    assert same(_ran(replays=0, **without), _ran(**without)) == "weights [] traced, [] under auto"


@pytest.mark.parametrize(
    ("change", "covered", "correct"),
    [
        ({}, True, True),
        ({"replays": 8}, False, True),
        ({"replays": 8, "calls": 2}, True, True),
        ({"replays": 7, "calls": 2}, False, True),
        ({"difference": "a weight"}, True, False),
        ({"error": "it broke"}, False, False),
        ({"steps": None, "replays": None}, False, False),
    ],
)
def test_row_is_judged_by_its_numbers(change: dict[str, Any], covered: bool, correct: bool) -> None:
    good: dict[str, Any] = {"stock": True, "calls": 1, "steps": 16, "replays": 10, "reasons": {"a reason": 1}}
    row = replay_coverage.Row("example", "HF", **{**good, **change})
    assert (row.covered, row.correct) == (covered, correct)
    made = report.Report("replay_coverage")
    replay_coverage.add_targets(made, [row], at_least=1)
    assert all(target.met for target in made.targets) is (covered and correct)


def test_a_program_that_is_not_covered_has_a_reason() -> None:
    row = functools.partial(replay_coverage.Row, "example", "HF", False, 1, steps=16, replays=0)
    for reasons, says, unexplained in ({"the step prints": 16}, "the step prints (16)", 0), ({}, "no reason", 1):
        made = report.Report("replay_coverage")
        replay_coverage.add_targets(made, [row(reasons=reasons)], at_least=0)
        assert made.targets[-1].value == unexplained
        assert says in replay_coverage.table_of([row(reasons=reasons)])


def test_there_are_forty_programs_each_under_its_own_name() -> None:
    assert len(programs.PROGRAMS) == len({program.name for program in programs.PROGRAMS}) == 40
    with pytest.raises(ValueError, match="gpt2"):
        programs.named("nothing like it")
