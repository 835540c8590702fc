"""The benchmark of sharding: a model is measured, and rows of earlier runs count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.isolation import run_in_child


def _run(path: Path, *arguments: str) -> int:
    # It names the devices in the environment when it is imported.
    from benchmarks import sharding

    return sharding.main(["--depths", "", "--json", str(path), "--check", *arguments])


@pytest.mark.long
def test_a_model_is_measured_and_counts_in_the_next_run(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    run_in_child(lambda: _run(first, "--models", "vit", "--widths", "32", "--caps", "none"))
    document = json.loads(first.read_text())
    (row,) = document["results"]["rows"]
    assert min(row["auto"]["wire"], row["auto"]["memory"]) > 0
    assert row["ratio"] == row["auto"]["wire"] / row["by_hand"]["wire"]
    assert row["by_hand"]["wire"] == min(step["wire"] for step in document["results"]["by hand"]["vit 32"])
    run_in_child(lambda: _run(second, "--models", "", "--join", str(first), str(first)))
    joined = json.loads(second.read_text())
    assert joined["results"]["rows"] == [row, row]
    assert {item["name"]: item["value"] for item in joined["targets"]} == {
        item["name"]: item["value"] for item in document["targets"]
    }


def test_targets_are_of_all_rows_that_are_joined(tmp_path: Path) -> None:
    paths = []
    for number, (by_hand, auto, said) in enumerate([(10.0, 4.0, 4.3), (10.0, 10.0, 12.0)]):
        steps = [
            {"name": "x", "wire": wire, "memory": 1.0, "predicted_wire": said, "predicted_memory": 1.0}
            for wire in (by_hand, auto)
        ]
        row = {"model": "m", "width": 1, "cap": "2", "budget": 2.0, "by_hand": steps[0], "auto": steps[1]}
        rows = [{**row, "seconds": 1.0, "error": "", "ratio": auto / by_hand}]
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps({"results": {"rows": rows, "by hand": {}}}))
    path = tmp_path / "all.json"
    status = run_in_child(lambda: _run(path, "--models", "", "--join", *map(str, paths)))
    assert status == 1
    targets = {item["name"]: (item["value"], item["met"]) for item in json.loads(path.read_text())["targets"]}
    assert targets["communication volume, auto : best template, the worst"] == (1.0, True)
    assert targets["communication volume, auto : best template, geometric mean"] == (pytest.approx(0.4**0.5), True)
    assert targets["predicted within 10% of measured, of all"] == (0.5, False)
