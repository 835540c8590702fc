"""The table: for a terminal, and as the documents have it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks import report
from benchmarks.explain.measure import Row

_HEADERS = ("fault", "loop", "expected", "cause", "line", "remedy", "other reports")


def table_of(rows: Sequence[Row]) -> str:
    """The rows, then what was said of those that are not right."""
    text = report.table(_HEADERS, [_values(row) for row in rows])
    wrong = [f"  {row.name}: {row.error or row.said or 'nothing'}" for row in rows if not _right(row)]
    return f"{text}\n\nnot right; said was:\n" + "\n".join(wrong) if wrong else text


def markdown(rows: Sequence[Row]) -> str:
    """The same for the documents, with all that was said."""
    table = report.markdown(_HEADERS, [_values(row) for row in rows])
    said = "\n".join(f"{row.name} ({row.loop}):\n\n{_indented(row.said)}\n" for row in rows if not row.harmless)
    return f"{table}\n\n## What is said\n\n{said}"


def _values(row: Row) -> tuple[object, ...]:
    expected = "nothing, one graph" if row.harmless else "a report"
    marks = ["yes" if value else "NO" for value in (row.cause, row.line, row.remedy)]
    return (row.name, row.loop, expected, *marks, len(row.others))


def _right(row: Row) -> bool:
    return row.cause and row.line and row.remedy and not row.others


def _indented(text: str) -> str:
    without_folders = re.sub(r"/\S*/(site-packages/|(?=benchmarks/))", "", text)
    return "\n".join(f"    {line}" for line in without_folders.splitlines())
