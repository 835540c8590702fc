"""One static page of the files that benchmarks write with --json.

    python -m benchmarks.dashboard FILES... -o page.html

Targets and misses over time, for each machine and setting; then what each benchmark measured last, peers side by side.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.report import text_of
from benchmarks.result_tables import ResultTable, tables_in

_STYLE = """
:root { color-scheme: light dark; --line: #d0d7de; --bad: #b42318; --good: #116329; --quiet: #59636e }
@media (prefers-color-scheme: dark) {
  :root { --line: #3d444d; --bad: #ff7b72; --good: #56d364; --quiet: #9198a1 }
  body { background: #0d1117; color: #e6edf3 }
}
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem }
h1 { font-size: 1.4rem }
h2 { border-top: 1px solid var(--line); font-size: 1.2rem; margin-top: 2rem; padding-top: 1rem }
h3 { font-size: 1rem } p.machine { color: var(--quiet); overflow-wrap: anywhere }
@media (min-width: 50rem) { td:first-child { white-space: nowrap } }
.wide { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .5rem 0 }
th, td { border-bottom: 1px solid var(--line); padding: .2rem .7rem; text-align: left; vertical-align: top }
td.number, th.number { text-align: right } .bad { color: var(--bad); font-weight: 600 } .good { color: var(--good) }
svg { display: block } polyline { fill: none; stroke: currentColor; stroke-width: 1.5 }
line { stroke: var(--quiet); stroke-dasharray: 3 }
"""
_WIDTH, _HEIGHT = 140, 28


@dataclass(frozen=True, kw_only=True)
class Run:
    """One file: what a benchmark measured at one time.

    Attributes:
        benchmark: its name.
        when: it was measured.
        machine: processor, cores and device.
        settings: what it ran with, as text.
        results: everything measured.
        targets: as the file has them.
    """

    benchmark: str
    when: datetime
    machine: str
    settings: str
    results: dict[str, Any]
    targets: list[dict[str, Any]]

    @classmethod
    def load(cls, path: Path) -> Run:
        """Reads a file.

        Raises:
            ValueError: it is none of a benchmark.
        """
        document = json.loads(path.read_text())
        if not isinstance(document, dict) or "benchmark" not in document:
            raise ValueError(f"{path}: no benchmark has written this")
        environment = document["environment"]
        # Files without a time were written when they were changed last.
        measured = document.get("measured") or datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat()
        return cls(
            benchmark=document["benchmark"],
            when=datetime.fromisoformat(measured),
            machine=f"{environment['processor']}, {environment['cores']} cores, {environment['pjrt_device']}",
            settings=json.dumps(document["settings"], sort_keys=True),
            results=document["results"],
            targets=document["targets"],
        )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="written by a benchmark with --json")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the page")
    options = parser.parse_args(arguments)
    try:
        runs = [Run.load(path) for path in options.files]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    options.output.write_text(page(runs), encoding="utf-8")
    print(options.output)
    return 0


def page(runs: Sequence[Run]) -> str:
    """The page as HTML, without scripts and without anything from elsewhere."""
    series = _series(runs)
    latest = [target for benchmark in series.values() for group in benchmark.values() for target in group[-1].targets]
    missed = sum(not target["met"] for target in latest)
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Benchmarks of xla-adapters</title>',
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>',
        "<h1>Benchmarks of xla-adapters</h1>",
        f'<p class="{"bad" if missed else "good"}">{missed} of {len(latest)} targets missed</p>',
    ]
    for benchmark, groups in series.items():
        parts.append(f"<h2>{escape(benchmark)}</h2>")
        for group in groups.values():
            parts += [_heading(group), _targets(group)]
            parts += [_table(table) for table in tables_in(group[-1].results)]
    return "\n".join([*filter(None, parts), "</body></html>\n"])


def _series(runs: Sequence[Run]) -> dict[str, dict[tuple[str, str], list[Run]]]:
    """The runs in order of time, by benchmark, and by machine and settings."""
    found: dict[str, dict[tuple[str, str], list[Run]]] = {}
    for run in sorted(runs, key=lambda run: (run.benchmark, run.when)):
        found.setdefault(run.benchmark, {}).setdefault((run.machine, run.settings), []).append(run)
    return found


def _heading(group: Sequence[Run]) -> str:
    last = group[-1]
    times = f"{len(group)} runs, the last " if len(group) > 1 else ""
    return f'<p class="machine">{escape(last.machine)}; {times}{last.when:%Y-%m-%d %H:%M}; {escape(last.settings)}</p>'


def _targets(group: Sequence[Run]) -> str:
    rows = []
    for target in group[-1].targets:
        name = target["name"]
        values = [found["value"] for run in group for found in run.targets if found["name"] == name]
        verdict = '<td class="good">met</td>' if target["met"] else '<td class="bad">MISSED</td>'
        rows.append(
            f'<tr><td>{escape(name)}</td><td class="number">{text_of(target["value"])}</td>'
            f"<td>{target['comparison']} {text_of(target['limit'])}</td>{verdict}"
            f"<td>{_line(values, target['limit'])}</td></tr>"
        )
    if not rows:
        return ""
    head = '<tr><th>target</th><th class="number">value</th><th>limit</th><th></th><th>over time</th></tr>'
    return f'<div class="wide"><table>{head}{"".join(rows)}</table></div>'


def _line(values: Sequence[float | None], limit: float) -> str:
    """The values as a line from left to right, and the limit dashed; nothing if they are all the same."""
    known = [value for value in values if value is not None]
    if len(set(known)) < 2:
        return ""
    low, high = min(*known, limit), max(*known, limit)

    def height(value: float) -> float:
        return round(_HEIGHT - 2 - (value - low) / ((high - low) or 1) * (_HEIGHT - 4), 1)

    points = " ".join(f"{index * _WIDTH / (len(known) - 1):.1f},{height(value)}" for index, value in enumerate(known))
    title = escape(", ".join(map(text_of, known)))
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img"><title>{title}</title>'
        f'<line x1="0" x2="{_WIDTH}" y1="{height(limit)}" y2="{height(limit)}"/><polyline points="{points}"/></svg>'
    )


def _table(table: ResultTable) -> str:
    head = "".join(f'<th class="number">{escape(column)}</th>' for column in table.columns)
    rows = "".join(
        f"<tr><td>{escape(name)}</td>"
        + "".join(f'<td class="number">{escape(text_of(cell))}</td>' for cell in cells)
        + "</tr>"
        for name, cells in table.rows
    )
    title = f"<h3>{escape(table.title)}</h3>" if table.title else ""
    return f'{title}<div class="wide"><table><tr><th></th>{head}</tr>{rows}</table></div>'


if __name__ == "__main__":
    sys.exit(main())
