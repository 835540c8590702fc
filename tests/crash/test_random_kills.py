"""Trainings of both adapters, killed at random moments: `benchmarks.crash` in small, and at length."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import crash
from tests.crash import kills
from tests.crash.killed_trainings import OURS, RUNS

IN_SHORT = {
    "hf_trainer, async": None,
    "XLAEagerStrategy, async": None,
    "hf_trainer, fsdp, in parts": "0.5",
    "XLAEagerStrategy, fsdp, in parts": "0.5",
}


_DEFAULT = "hf_trainer, async"


@pytest.mark.parametrize(
    "name", [_DEFAULT, *(pytest.param(name, marks=pytest.mark.slow) for name in IN_SHORT if name != _DEFAULT)]
)
def test_a_kill_and_a_few_bits(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, grace = tmp_path / "crash.json", IN_SHORT[name]
    command = ["--kills", "1", "--bits", "4", "--seed", "1", "--runs", name, "--json", str(path), "--check"]
    assert crash.main([*command, *(["--grace", grace] if grace else [])]) == 0
    (row,) = json.loads(path.read_text())["results"]["rows"]
    assert (row["kills"], row["identical"], row["bits"], row["caught"]) == (1, 1, 4, 4)
    assert name in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", list(OURS))
def test_five_kills(name: str, tmp_path: Path) -> None:
    """Of each way to save; `benchmarks.crash` kills more often."""
    result = kills.kill(name, 5, 3, tmp_path)
    assert (result.kills, result.resumed, result.identical, result.errors) == (5, 5, 5, [])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OURS if "parts" in name or "async" in name])
def test_terminated_and_killed_after_a_grace_period(name: str, tmp_path: Path) -> None:
    result = kills.kill(name, 3, 4, tmp_path, 1.0)
    assert (result.kills, result.resumed, result.identical, result.errors) == (3, 3, 3, [])


def test_a_peer_does_not_notice_bits(tmp_path: Path) -> None:
    """If that were not counted, nothing would be."""
    name = "Lightning's Trainer"
    kills.whole(RUNS[name], tmp_path)
    caught, silent = kills.flip(name, 6, 1, tmp_path)
    assert caught + len(silent) == 6
    assert silent
