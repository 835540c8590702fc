"""The benchmark of checkpoints, with little to write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import checkpoint


def test_every_run_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.json"
    command = ["--megabytes", "6", "--rounds", "2", "--folder", str(tmp_path / "disk"), "--json", str(path)]
    assert checkpoint.main(command) == 0
    document = json.loads(path.read_text())
    rows = {row["run"]: row for row in document["results"]["rows"]}
    assert list(rows) == list(checkpoint.RUNS)
    assert all(0 < row["blocked_seconds_per_gb"] <= row["total_seconds_per_gb"] for row in rows.values())
    assert rows[checkpoint.ASYNC]["blocked_seconds_per_gb"] < rows[checkpoint.ASYNC]["total_seconds_per_gb"]
    (target,) = document["targets"]
    printed = capsys.readouterr().out
    assert f"{target['value']:.2f} times the copy to the host" in printed
    assert not list((tmp_path / "disk").iterdir())
