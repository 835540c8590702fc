"""The report as text and page, and MFU from a table of devices."""

from __future__ import annotations

import dataclasses
import html
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from xla_adapters.insight import run_record
from xla_adapters.insight.run_report import RunReport, StepSummary, page
from xla_adapters.insight.transfer_lines import TO_HOST, TransferLine
from xla_adapters.runtime import CompiledMemory
from xla_adapters.tracing.compile_events import CompileEvent
from xla_adapters.tracing.graph_analysis import GraphAnalysis

GRAPH = GraphAnalysis(
    hash="ab12",
    operations=7,
    inputs=3,
    input_bytes=3 << 20,
    outputs=2,
    output_bytes=2048,
    parameters=1,
    parameter_bytes=1 << 20,
)
MEMORY = CompiledMemory(inputs=3 << 20, outputs=2048, aliased=2048, temporaries=5 << 20, code=0)
EVENT = CompileEvent(
    step="train", number=2, call=9, graphs=1, seconds=1.5, reason="x < y", line="a.py:3", graph=GRAPH, memory=MEMORY
)

READ = TransferLine(line="a.py:7", direction=TO_HOST, call=".item()", count=3, bytes=12, is_sampled=True)


def report(**options: Any) -> RunReport:
    values: dict[str, Any] = {
        "about": {"model": "<b>"},
        "wall": {"steps": 6.0, "compile": 1.5, "other host code": 2.5},
        "host_cpu_seconds": 4.0,
        "steps": {"steps": 2, "p50": 0.5, "p90": 1.0, "p99": 1.0, "slowest": 1.0, "slow": []},
        "curve": [{"step": 1, "median": 0.5, "slowest": 0.5}, {"step": 2, "median": 1.0, "slowest": 1.0}],
        "rates": {"goodput": 0.6, "steps_per_second": 0.25, "flops_per_second": 8e9, "mfu": None},
        "counts": {"compiles": 1, "executions": 2},
        "compiles": [EVENT],
        "programs": [StepSummary(name="train", calls=9, replays=5, reasons={"a <hook>": 1})],
        "checkpoints": [{"step": 2, "path": "out/checkpoint-2", "seconds": 0.25}],
        "transfers": [
            TransferLine(line="a.py:7", direction=TO_HOST, call=".item()", count=3, bytes=12, is_sampled=True)
        ],
        "transfers_looked_at": 2,
        "memory": {"bytes_used": 3 << 30},
        "plan": "",
    }
    return RunReport(**{**values, **options})


def test_the_text_has_everything() -> None:
    text = str(report(plan="cut in two"))
    for part in (
        "2 steps in 10.0 s",
        "steps                 6.00 s   60.0%",
        "p50 0.5000 s",
        "mfu: unknown",
        "executions: 2",
        "bytes_used: 3.0 GiB",
        "train: 9 calls, 5 replayed",
        "traced 1 times: a <hook>",
        "train: graph 2, 1.50 s (call 9, a.py:3): x < y",
        "3 inputs of 3.0 MiB (1 of them parameters), 2 outputs of 2.0 KiB, 7 operations, FLOPs unknown",
        "  a.py:7: 3 to the host by .item(), 12 B",
        "memory 8.0 MiB: inputs 3.0 MiB, outputs 2.0 KiB, aliased 2.0 KiB, temporaries 5.0 MiB",
        "saved out/checkpoint-2 at step 2: 0.25 s",
        "cut in two",
    ):
        assert part in text


def test_memory_by_kind() -> None:
    known = page(report().as_dict(), [])
    assert "The largest graph is number 2 of train" in known
    assert "<td>values between operations</td><td>5.0 MiB</td>" in known
    assert report().as_dict()["compiles"][0]["memory"]["total"] == 8 << 20
    unknown = page(report(compiles=[dataclasses.replace(EVENT, memory=None)]).as_dict(), [])
    assert "<td>memory</td><td>not known</td>" in unknown
    assert "does not tell" in unknown


def test_transfers_by_line() -> None:
    values = report().as_dict()
    assert values["transfers"][0]["line"] == "a.py:7"
    shown = page(values, [])
    assert "<td>a.py:7</td><td>to the host</td><td>.item()</td><td>3 seen</td><td>12 B</td>" in shown
    assert "in 2 of 2 steps" in shown


def test_the_page_escapes_what_it_shows() -> None:
    made = page(report(plan="<i>").as_dict(), report().curve)
    assert not [text for text in ("<b><", "<hook>", "x < y", "<i>") if text in made]
    for part in ("&lt;b&gt;", "a &lt;hook&gt;", "x &lt; y", "&lt;i&gt;", "chosen by torch_xla", "100.0%"):
        assert part in made


def test_a_long_run_has_a_short_page() -> None:
    slow = [{"step": step, "seconds": 2.0, "cause": "saves", "cause_seconds": 1.5} for step in range(200)]
    steps = {**report().steps, "slow": slow}
    curve = [{"step": float(step), "median": 0.5, "slowest": 1.0} for step in range(400)]
    made = page(report(steps=steps, compiles=[EVENT] * 500).as_dict(), curve)
    assert len(made) < 400_000
    assert "and 100 more" in made
    assert "and 400 more, in xla-events.jsonl" in made


def test_a_run_without_a_step() -> None:
    empty = report(steps={"steps": 0, "slow": []}, curve=[], rates={}, counts={}, compiles=[], programs=[])
    assert "0 steps in" in str(empty)
    assert "No step has ended." in page(empty.as_dict(), [])


def test_in_a_notebook_it_is_the_page_and_at_a_prompt_it_is_short() -> None:
    shown = repr(report(compiles=[EVENT] * 50)).splitlines()
    assert len(shown) == 15
    assert shown[0] == "2 steps in 10.0 s"
    assert shown[-1].startswith("... and ")
    given = report(plan='a "<b>"')
    source = re.fullmatch(
        '<iframe srcdoc="([^"]*)" width="100%" height="600" style="[^"]*"></iframe>', given._repr_html_()
    )
    assert source is not None
    # Each chart has an id of its own.
    pages = [
        re.sub("chart-[0-9a-f-]{36}", "", made)
        for made in (html.unescape(source[1]), page(given.as_dict(), given.curve))
    ]
    assert pages[0] == pages[1]


def test_the_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    report().write_page(tmp_path / "run" / "xla-report.html")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["xla-report.html"]
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="could not be written"):
        report().write_page(tmp_path / "file" / "xla-report.html")


@pytest.mark.parametrize(
    ("kind", "spmd", "expected"),
    [("TPU v5 lite", False, 197e12), ("TPU v4", True, 4 * 275e12), ("cpu", False, None), ("", True, None)],
)
def test_the_peak_of_known_devices(
    kind: str, spmd: bool, expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(kind=lambda: kind, count=lambda: 4, is_spmd=lambda: spmd)
    monkeypatch.setattr(run_record, "get_runtime", lambda: SimpleNamespace(device=device))
    assert run_record.peak_flops() == expected
