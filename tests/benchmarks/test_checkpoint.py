"""The benchmark of checkpoints, with little to write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import checkpoint
from benchmarks.checkpoint import TRAINERS


@pytest.mark.parametrize(
    "trainers", [["hf_trainer, async"], pytest.param(list(TRAINERS), marks=pytest.mark.slow)], ids=["one", "all"]
)
def test_every_run_is_measured(trainers: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.json"
    command = ["--megabytes", "6", "--rounds", "2", "--folder", str(tmp_path / "disk"), "--json", str(path)]
    assert checkpoint.main([*command, "--trainers", ";".join(trainers)]) == 0
    document = json.loads(path.read_text())
    rows = {row["run"]: row for row in document["results"]["rows"]}
    assert list(rows) == [*checkpoint.RUNS, *trainers]
    assert all(0 < row["blocked_seconds_per_gb"] <= row["total_seconds_per_gb"] for row in rows.values())
    targets = {target["name"].partition(":")[0]: target["value"] for target in document["targets"]}
    assert list(targets) == [name for name in rows if name.endswith("async")]
    printed = capsys.readouterr().out
    for name, value in targets.items():
        assert rows[name]["blocked_seconds_per_gb"] < rows[name]["total_seconds_per_gb"]
        assert f"{name}: blocked for {value:.2f} times the copy to the host" in printed
    assert not list((tmp_path / "disk").iterdir())
