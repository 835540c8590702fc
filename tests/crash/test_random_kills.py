"""Trainings of both adapters, killed at random moments: `benchmarks.crash` in small, and at length."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import crash
from benchmarks.crash_runs import OURS


@pytest.mark.parametrize("name", [name for name in OURS if "async" in name])
def test_a_few_kills_and_bits(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "crash.json"
    assert (
        crash.main(["--kills", "2", "--bits", "4", "--seed", "1", "--runs", name, "--json", str(path), "--check"]) == 0
    )
    (row,) = json.loads(path.read_text())["results"]["rows"]
    assert (row["kills"], row["identical"], row["bits"], row["caught"]) == (2, 2, 4, 4)
    assert name in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", list(OURS))
def test_twenty_five_kills(name: str, tmp_path: Path) -> None:
    """A hundred in all."""
    result = crash.kill(name, 25, 3, tmp_path)
    assert (result.kills, result.resumed, result.identical, result.errors) == (25, 25, 25, [])


def test_a_peer_does_not_notice_bits(tmp_path: Path) -> None:
    """If that were not counted, nothing would be."""
    name = "Lightning's Trainer"
    crash.whole(crash.RUNS[name], tmp_path)
    caught, silent = crash.flip(name, 6, 1, tmp_path)
    assert caught + len(silent) == 6
    assert silent
