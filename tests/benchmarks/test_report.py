"""Targets, tables, files and exit codes of the benchmarks; the child runner."""

from __future__ import annotations

import functools
import io
import json
import os
import time
from pathlib import Path

import pytest

from benchmarks import report
from tests import children
from tests.children import run_in_child


def _report(value: float | None) -> report.Report:
    made = report.Report("example", settings={"steps": 3}, results={"rows": [1, 2]})
    made.target("speed", value, "at least", 2.0)
    made.target("executions", 1, "exactly", 1)
    return made


@pytest.mark.parametrize(
    ("value", "comparison", "limit", "met"),
    [
        (2.0, "at least", 2.0, True),
        (1.99, "at least", 2.0, False),
        (1.0, "at most", 1.0, True),
        (1.01, "at most", 1.0, False),
        (1, "exactly", 1, True),
        (2, "exactly", 1, False),
        (float("nan"), "at most", 1.0, False),
        (None, "at most", 1.0, False),
    ],
)
def test_target(value: float | None, comparison: report.Comparison, limit: float, met: bool) -> None:
    assert report.Target("name", value, comparison, limit).met is met


@pytest.mark.parametrize(("value", "code", "word"), [(2.5, 0, "met"), (1.5, 1, "MISSED"), (None, 1, "MISSED")])
def test_check_exits_with_1_on_a_missed_target_and_shows_it(value: float | None, code: int, word: str) -> None:
    out = io.StringIO()
    assert _report(value).finish(report.parser("d").parse_args(["--check"]), out) == code
    (line,) = [line for line in out.getvalue().splitlines() if line.startswith("speed")]
    assert line.endswith(word)
    assert "at least 2" in line


def test_without_check_a_missed_target_is_no_failure() -> None:
    assert _report(0.1).finish(report.parser("d").parse_args([])) == 0


def test_check_without_targets_fails() -> None:
    assert report.Report("empty").finish(report.parser("d").parse_args(["--check"]), io.StringIO()) == 1


def test_json_holds_results_targets_and_versions(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert _report(1.5).finish(report.parser("d").parse_args(["--json", str(path)])) == 0
    document = json.loads(path.read_text())
    assert document["results"] == {"rows": [1, 2]}
    assert [target["met"] for target in document["targets"]] == [False, True]
    assert document["targets"][0]["value"] == 1.5
    assert document["environment"]["versions"]["torch"] == report.environment()["versions"]["torch"]


def test_table_aligns_numbers_and_shows_what_is_missing() -> None:
    lines = report.table(("name", "count"), [("a", 1), ("long name", 1234567), ("none", None)]).splitlines()
    assert [line[-7:].strip() for line in lines[2:]] == ["1", "1234567", "-"]
    assert len({len(line) for line in lines}) == 1


def test_child_returns_its_value() -> None:
    outcome = run_in_child(lambda: (os.getpid(), os.environ["EXAMPLE"]), timeout=240, env={"EXAMPLE": "x"})
    assert outcome.ok
    assert outcome.value[0] != os.getpid()
    assert outcome.value[1] == "x"
    assert "EXAMPLE" not in os.environ


def test_child_that_raises_or_dies_is_an_error() -> None:
    raised = run_in_child(lambda: 1 // 0, timeout=240)
    assert raised.short_error == "ZeroDivisionError: integer division or modulo by zero"
    died = run_in_child(lambda: os._exit(3), timeout=240)
    assert died.short_error == "the process died with exit code 3"


def test_child_that_hangs_is_killed() -> None:
    outcome = run_in_child(lambda: time.sleep(600), timeout=0.5)
    assert "still running" in str(outcome.error)


def test_child_that_still_computes_has_more_time() -> None:
    def computes(seconds: float) -> str:
        while time.process_time() < seconds:
            pass
        return "done"

    longer = functools.partial(computes, 0.5)
    assert run_in_child(longer, timeout=0.1, deadline_factor=1e6).value == "done"
    forever = functools.partial(computes, float("inf"))
    assert "still running" in str(run_in_child(forever, timeout=0.1, deadline_factor=5).error)


def test_child_that_hangs_has_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_LOOKED_AT_SECONDS", 0.5)
    outcome = run_in_child(lambda: time.sleep(600), timeout=0.5, deadline_factor=1e6)
    assert "still running" in str(outcome.error)
