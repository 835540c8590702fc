"""The page of benchmarks' files: targets over time, peers side by side, files that are none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import dashboard, report
from benchmarks.result_tables import tables_in


def _file(folder: Path, name: str, value: float, *, measured: str | None = None, **changes: Any) -> Path:
    made = report.Report("speed<1>", settings={"steps": 3}, results=changes.pop("results", {}))
    made.target("steps per second", value, "at least", 2.0)
    path = folder / name
    made.write_json(path)
    document = json.loads(path.read_text())
    document["environment"]["processor"] = changes.get("processor", "a processor")
    if measured is not None:
        document["measured"] = measured
    path.write_text(json.dumps(document))
    return path


def _page(*files: Path) -> str:
    output = files[0].parent / "page.html"
    assert dashboard.main([*map(str, files), "-o", str(output)]) == 0
    return output.read_text()


def test_targets_are_shown_over_time_with_the_last_verdict(tmp_path: Path) -> None:
    late = _file(tmp_path, "a.json", 1.0, measured="2026-03-02T00:00:00+00:00")
    early = _file(tmp_path, "b.json", 4.0, measured="2026-03-01T00:00:00+00:00")
    text = _page(late, early)
    assert "1 of 1 targets missed" in text
    assert '<td class="bad">MISSED</td>' in text
    assert "<title>4, 1</title>" in text
    assert "2 runs, the last 2026-03-02 00:00" in text
    (points,) = re.findall(r'points="([^"]*)"', text)
    assert points == "0.0,2.0 140.0,26.0"
    assert "speed&lt;1&gt;" in text
    assert "<script" not in text


def test_machines_are_apart(tmp_path: Path) -> None:
    text = _page(_file(tmp_path, "a.json", 1.0), _file(tmp_path, "b.json", 3.0, processor="another"))
    assert "1 of 2 targets missed" in text
    assert "<svg" not in text


def test_a_file_without_a_time_has_that_of_its_change(tmp_path: Path) -> None:
    path = _file(tmp_path, "a.json", 3.0)
    document = json.loads(path.read_text())
    del document["measured"]
    path.write_text(json.dumps(document))
    assert dashboard.Run.load(path).when.timestamp() == pytest.approx(path.stat().st_mtime, abs=1e-3)


@pytest.mark.parametrize("content", ["[]", "{", '{"a": 1}'])
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(SystemExit):
        dashboard.main([str(path), "-o", str(tmp_path / "page.html")])
    assert not (tmp_path / "page.html").exists()


def test_peers_are_rows_of_one_table(tmp_path: Path) -> None:
    peers = {"stock": {"wall_ms": 5.0, "blocks": [[1, 2]]}, "ours": {"wall_ms": 2.5, "host_ms": None, "compiles": 1}}
    text = _page(_file(tmp_path, "a.json", 3.0, results={"models": {"2x16": {"timings": peers}}}))
    assert "<h3>models: 2x16: timings</h3>" in text
    assert '<td>stock</td><td class="number">5</td><td class="number">-</td>' in text
    assert '<td>ours</td><td class="number">2.5</td><td class="number">1</td>' in text


def _tables(results: Any) -> list[tuple[str, list[str], list[tuple[str, list[Any]]]]]:
    return [
        (table.title, list(table.columns), [(name, list(row)) for name, row in table.rows])
        for table in tables_in(results)
    ]


def test_rows_of_a_list_are_called_by_their_words() -> None:
    runs = [
        {"model": "GPT-2", "trainer": "ours", "in_all": {"compiles": 1}, "per_step": {}},
        {"model": "ViT", "calls": 3},
    ]
    assert _tables({"runs": runs}) == [
        ("runs", ["in_all compiles", "calls"], [("GPT-2, ours", [1, None]), ("ViT", [None, 3])])
    ]


def test_plain_figures_and_repeated_measurements() -> None:
    repeated = {"ours": [{"ms": 1.0, "host": "a"}, {"ms": 4.0, "host": "a"}, {"ms": 2.0, "host": "a"}]}
    assert _tables({"share": 0.5, "rate": {"eager": 3, "lazy": 4}, "1x16": repeated}) == [
        ("", [""], [("share", [0.5])]),
        ("rate", [""], [("eager", [3]), ("lazy", [4])]),
        ("1x16", ["ms", "host"], [("ours", [2.0, "a"])]),
    ]


def test_results_without_figures_have_no_table() -> None:
    assert _tables({"a": [], "b": {"c": [[1, 2]]}, "d": None}) == []
