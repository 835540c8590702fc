"""The table: for a terminal, and as the documents have it."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import report
from benchmarks.operators.measure import LIMIT
from benchmarks.operators.row import Row

_HEADERS = ("operator", "samples", "forward", "backward", "difference", "")


def table_of(rows: Sequence[Row]) -> str:
    """The rows, then what is missed and why."""
    text = report.table(_HEADERS, [_values(row) for row in rows])
    notes = [f"  {row.operator}: {note}" for row in rows for note in row.notes]
    return f"{text}\n\nnot in the graph, or not equal, and why:\n" + "\n".join(notes) if notes else text


def markdown(rows: Sequence[Row]) -> str:
    """The same for the documents."""
    text = report.markdown(_HEADERS, [_values(row) for row in rows])
    notes = [f"- `{row.operator}`: `{note}`" for row in rows for note in row.notes]
    return f"{text}\n\n## Not in the graph, or not equal\n\n" + "\n".join(notes)


def summary(rows: Sequence[Row]) -> str:
    """The figures in a sentence each."""
    own = sum(row.how == "in the graph" for row in rows)
    other = sum(row.how == "by decomposition" for row in rows)
    host = sum(row.how == "on the host" for row in rows)
    fails = sum(row.how == "fails" for row in rows)
    untried = sum(not row.tried for row in rows)
    differs = sum(row.in_graph and row.differs for row in rows)
    return (
        f"{own + other} of {len(rows)} core operators are part of a step's graph ({own} by a kernel of their own,\n"
        f"{other} by a decomposition), {host} are on the host, {fails} fail, {untried} were not tried. {differs} of\n"
        f"those in the graph are not within {LIMIT:g} of the CPU."
    )


def _values(row: Row) -> tuple[object, ...]:
    difference = None if row.difference is None else f"{row.difference:.0e}"
    if row.without_values is not None and not row.differs:
        difference = f"shapes alone ({row.without_values})"
    mark = "not tried" if not row.tried else "" if row.in_graph and not row.differs else "MISSED"
    return (row.operator, row.samples, row.forward, row.backward, difference, mark)
