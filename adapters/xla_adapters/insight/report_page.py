"""`page`: the report of a run as one HTML file that needs no other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any, Protocol

from xla_adapters.insight import charts
from xla_adapters.tracing.graph_analysis import in_bytes

# Rows of a table; of more, the first and a line that says how many are left out.
_ROWS = 100
_COUNTS = {
    "compiles": "graphs compiled",
    "executions": "executions",
    "transfers_to_host": "transfers to the host",
    "transfers_to_device": "transfers to the device",
    "eager_ops": "eager operations",
}
_WITHOUT_CHARTS = 'The charts are drawn with pygal, which is not installed: pip install "xla-adapters[report]"'


class Preflight(Protocol):
    """What a report shows of a pre-flight, of the tool of that name."""

    @property
    def topology(self) -> str:
        """The slice of TPUs that the steps were compiled for."""

    @property
    def verdict(self) -> str:
        """Whether the training fits it, in a line."""

    def as_values(self) -> dict[str, Any]:
        """Plain values, for JSON."""

    def section(self) -> str:
        """The details as HTML."""


def page(report: Mapping[str, Any], curve: Sequence[Mapping[str, float]], preflight: Preflight | None = None) -> str:
    """The page.

    Args:
        report: as `RunReport.as_dict`.
        curve: as `RunReport.curve`.
        preflight: as `RunReport.preflight`.
    """
    sections = [
        _section("What it is", _about(report)),
        _section("Where the time went", _wall(report)),
        _section("Step times", _steps(report["steps"], curve)),
        _section("Compiles", _compiles(report["compiles"])),
        _section("Replayed or traced", _programs(report["programs"])),
        _section("Executions and transfers", _counts(report["counts"]) + _transfers(report)),
        _section("Checkpoints", _checkpoints(report["checkpoints"])),
        _section("Memory", _memory(report)),
    ]
    if report["plan"]:
        sections.append(_section("Sharding plan", f"<pre>{escape(report['plan'])}</pre>"))
    if preflight is not None:
        verdict = f"<p><b>{escape(preflight.verdict)}</b></p>"
        sections.append(_section(f"Pre-flight for {preflight.topology}", verdict + preflight.section()))
    style = resources.files("xla_adapters.insight").joinpath("report.css").read_text(encoding="utf-8")
    note = "" if charts.can_draw() else f'<p class="note">{escape(_WITHOUT_CHARTS)}</p>'
    title = f"XLA report: {report['about'].get('model', 'a training')}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><style>{style}</style></head>'
        f"<body><main><h1>{escape(title)}</h1>{note}{''.join(sections)}</main></body></html>\n"
    )


def _about(report: Mapping[str, Any]) -> str:
    rates, steps = report["rates"], report["steps"]["steps"]
    tiles = [("steps", f"{steps:,}"), ("wall time", _seconds(report["wall_seconds"]))]
    if rates:
        tiles.append(("goodput", _percent(rates["goodput"])))
        name = next((name for name in ("tokens_per_second", "samples_per_second") if name in rates), None)
        if name is not None:
            tiles.append((name.replace("_per_second", " per second"), f"{rates[name]:,.4g}"))
        flops = rates["flops_per_second"]
        tiles.append(("FLOPs per second", "unknown" if flops is None else f"{flops:.3g}"))
        tiles.append(("MFU", "unknown" if rates["mfu"] is None else _percent(rates["mfu"])))
    shown = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in tiles)
    about = _table((), [(name, str(value)) for name, value in report["about"].items()])
    return f'<div class="tiles">{shown}</div>{about}'


def _wall(report: Mapping[str, Any]) -> str:
    total = max(report["wall_seconds"], 1e-9)
    parts = sorted(report["wall"].items(), key=lambda item: -item[1])
    rows = [(name, f"{seconds:.2f} s", _percent(seconds / total)) for name, seconds in parts]
    rows.append(("together", f"{total:.2f} s", "100.0%"))
    note = (
        "Time of the thread that trains, as the host sees it. Steps: tracing, starting the executable, and waiting for "
        f"results. The thread used {report['host_cpu_seconds']:.2f} s of CPU time. Goodput is the share of the steps."
    )
    bars = charts.bars([(name, seconds) for name, seconds in parts if seconds > 0.001 * total], "seconds")
    return f"{bars}{_table(('', 'seconds', 'share'), rows)}<p>{note}</p>"


def _steps(steps: Mapping[str, Any], curve: Sequence[Mapping[str, float]]) -> str:
    if "p50" not in steps:
        return "<p>No step has ended.</p>"
    names = {"p50": "median", "p90": "90th percentile", "p99": "99th percentile", "slowest": "slowest"}
    found = _table((), [(title, _seconds(steps[name])) for name, title in names.items()])
    drawn = ("median", "slowest") if steps["steps"] > len(curve) else ("slowest",)
    lines = [(name if len(drawn) > 1 else "step", [(point["step"], point[name]) for point in curve]) for name in drawn]
    note = "<p>A step lasts from the end of the one before, with all that happens in between.</p>"
    slow = [
        (f"{item['step']}", _seconds(item["seconds"]), item["cause"], _seconds(item["cause_seconds"]))
        for item in steps["slow"]
    ]
    heads = ("step", "took", "cause", "of which")
    outliers = f"<h3>Slow steps</h3>{_table(heads, slow)}" if slow else "<p>No step was slow.</p>"
    return f"{charts.lines(lines, 'step', 'seconds')}{found}{note}{outliers}"


def _compiles(events: Sequence[Mapping[str, Any]]) -> str:
    if not events:
        return "<p>Nothing was compiled.</p>"
    found = []
    for event in events[:_ROWS]:
        position = ", ".join(part for part in (f"call {event['call']}", event["where"], event["line"]) if part)
        graph = event["graph"]
        rows = [*(_graph_rows(graph) if graph is not None else ()), *_memory_rows(event["memory"])]
        facts = _table((), rows) if rows else ""
        head = f"{event['step']}: graph {event['number']}, {_seconds(event['seconds'])}"
        found.append(
            f"<details open><summary>{escape(head)}</summary><p class='note'>{escape(position)}</p>"
            f"<pre>{escape(event['reason'])}</pre>{facts}</details>"
        )
    left = len(events) - _ROWS
    more = f"<p>and {left} more, in xla-events.jsonl</p>" if left > 0 else ""
    times = [(f"{event['step']} {event['number']}", event["seconds"]) for event in events[:_ROWS]]
    return f"{charts.bars(times, 'seconds')}{''.join(found)}{more}"


def _graph_rows(graph: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [
        (name, f"{graph[name]:,} of {in_bytes(graph[size])}")
        for name, size in (("inputs", "input_bytes"), ("outputs", "output_bytes"), ("parameters", "parameter_bytes"))
    ]
    donated = graph["donated"]
    rows.append(
        ("donated", "chosen by torch_xla" if donated is None else f"{donated:,} of {in_bytes(graph['donated_bytes'])}")
    )
    rows.append(("operations", f"{graph['operations']:,}"))
    rows.append(("FLOPs", "unknown" if graph["flops"] is None else f"{graph['flops']:,}"))
    rows.append(("hash", graph["hash"]))
    return rows


def _memory_rows(memory: Mapping[str, int] | None) -> list[tuple[str, str]]:
    if memory is None:
        return [("memory", "not known")]
    names = {
        "total": "memory of a device",
        "inputs": "of which inputs",
        "outputs": "outputs",
        "aliased": "of which in place of inputs",
        "temporaries": "values between operations",
        "code": "code",
    }
    return [(title, in_bytes(memory[name])) for name, title in names.items() if memory[name] or name != "code"]


def _programs(programs: Sequence[Mapping[str, Any]]) -> str:
    rows = [(item["name"], f"{item['calls']:,}", f"{item['replays']:,}") for item in programs]
    reasons = [(item["name"], f"{times:,}", reason) for item in programs for reason, times in item["reasons"].items()]
    why = f"<h3>Why calls were traced</h3>{_table(('step', 'calls', 'reason'), reasons)}" if reasons else ""
    return f"{_table(('step', 'calls', 'replayed'), rows)}{why}"


def _counts(counts: Mapping[str, int]) -> str:
    return _table((), [(title, f"{counts[name]:,}") for name, title in _COUNTS.items() if name in counts])


def _transfers(report: Mapping[str, Any]) -> str:
    rows = [
        (
            item["line"] or "elsewhere",
            item["direction"],
            item["call"],
            f"{item['count']:,}{' seen' if item['is_sampled'] else ''}",
            in_bytes(item["bytes"]),
        )
        for item in report["transfers"]
    ]
    note = (
        "Copies of the trainer (for logs, metrics and checkpoints) are all here. Those that callbacks make are seen in "
        f"{report['transfers_looked_at']} of {report['steps']['steps']} steps. Others, such as the batches, are in the "
        "numbers above only."
    )
    table = _table(("line", "direction", "by", "copies", "size"), rows) if rows else "<p>None was seen.</p>"
    return f"<h3>Transfers by line</h3>{table}<p class='note'>{note}</p>"


def _checkpoints(saves: Sequence[Mapping[str, Any]]) -> str:
    rows = [(f"{save['step']}", _seconds(save["seconds"]), save["path"]) for save in saves]
    return _table(("step", "took", "where"), rows) if rows else "<p>None was saved.</p>"


def _memory(report: Mapping[str, Any]) -> str:
    events = [event for event in report["compiles"] if event["memory"] is not None]
    rows = [(f"device: {name}", in_bytes(size)) for name, size in report["memory"].items()]
    if not events:
        note = "The runtime does not tell how much memory XLA needs for values between operations."
        return f"{_table((), rows)}<p class='note'>{note}</p>"
    largest = max(events, key=lambda event: event["memory"]["total"])
    kinds = [(name, largest["memory"][name]) for name in ("inputs", "outputs", "temporaries", "code")]
    note = (
        f"The largest graph is number {largest['number']} of {largest['step']}. The figures are of the compiler, and "
        "exact to about 1 KiB. Outputs that lie in place of inputs are counted once in its memory."
    )
    bars = charts.bars([(name, size / (1 << 20)) for name, size in kinds if size], "MiB")
    return f"{bars}{_table((), [*rows, *_memory_rows(largest['memory'])])}<p class='note'>{note}</p>"


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rows = list(rows)
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in rows[:_ROWS])
    more = f"<p>and {len(rows) - _ROWS} more</p>" if len(rows) > _ROWS else ""
    return f'<div class="wide"><table>{f"<tr>{head}</tr>" if head else ""}{body}</table></div>{more}'


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
