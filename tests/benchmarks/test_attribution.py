"""What the benchmark of the run report's times checks, and that it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import attribution
from benchmarks.attribution import KINDS, Measured, add_targets
from benchmarks.report import Report


def _missed(*, reported: float = 9.9, seconds: float = 10.0, **stalls: tuple[float, float]) -> list[str]:
    made = Report("attribution")
    all_stalls = dict.fromkeys(KINDS, (1.0, 0.98)) | {name.replace("_", " "): pair for name, pair in stalls.items()}
    add_targets(made, "HF", Measured(seconds=seconds, reported={"steps": reported}, stalls=all_stalls))
    return [target.name.partition(": ")[2] for target in made.targets if not target.met]


def test_what_is_missed() -> None:
    assert _missed() == []
    assert _missed(reported=9.7) == ["share of the wall time that the sum of the parts is off"]
    assert _missed(reported=10.3) == ["share of the wall time that the sum of the parts is off"]
    assert _missed(input_wait=(1.0, 0.9)) == ["share of a stall that input wait is off"]
    assert _missed(saves=(1.0, 1.1)) == ["share of a stall that saves is off"]
    # It did not happen.
    assert _missed(compile=(0.0, 0.0)) == ["share of a stall that compile is off"]


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["HF", "Lightning"])
def test_the_program(trainer: str, tmp_path: Path) -> None:
    path = tmp_path / "attribution.json"
    assert attribution.main(["--trainers", trainer, "--length", "0.1", "--json", str(path)]) == 0
    found = json.loads(path.read_text())["results"][trainer]
    # Whatever the machine does besides: all kinds are there, and none is in another one.
    assert set(found["stalls"]) == set(KINDS)
    for kind in KINDS[:-1]:
        passed, reported = found["stalls"][kind]
        assert reported >= passed >= 0.1
    assert found["stalls"]["compile"][1] > 0
