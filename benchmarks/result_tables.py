"""Tables of what a benchmark measured: each has its own form of results, and rows are found in all of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SCALARS = (bool, int, float, str)


@dataclass(frozen=True, kw_only=True)
class ResultTable:
    """Rows with a name (a run, a peer, a model) and their figures.

    Attributes:
        title: the path to it in the results.
        columns: names of the figures.
        rows: name and figures of each row; None where it lacks one.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Any]]]


def tables_in(results: Any, title: str = "") -> Iterator[ResultTable]:
    """Every table in the results of a benchmark, the outermost that have figures of their own.

    Args:
        results: nested dicts and lists of plain values.
        title: of what they are a part.
    """
    if isinstance(results, list):
        results = dict(enumerate(results)) if all(isinstance(item, dict) for item in results) else {}
    if not isinstance(results, dict) or not results:
        return
    rows = {str(name): row for name, value in results.items() if (row := _row(value))}
    if len(rows) == len(results):
        yield _table(title, rows)
        return
    plain = {name: value for name, value in results.items() if isinstance(value, _SCALARS)}
    if plain:
        yield _table(title, {str(name): {"": value} for name, value in plain.items()})
    for name, value in results.items():
        yield from tables_in(value, f"{title}: {name}" if title else str(name))


def _row(value: Any) -> dict[str, Any]:
    """The figures of a row; empty if the value is none."""
    if isinstance(value, list):
        found = [_row(item) for item in value]
        return _repeated(found) if found and all(found) else {}
    if not isinstance(value, dict) or not any(isinstance(item, _SCALARS) for item in value.values()):
        return {}
    row = {}
    for name, item in value.items():
        if isinstance(item, _SCALARS):
            row[name] = item
        elif isinstance(item, dict):
            row |= {f"{name} {inner}": part for inner, part in item.items() if isinstance(part, _SCALARS)}
    return row


def _repeated(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of repeated measurements the medians; empty if they are of different things, which have different words."""
    found: dict[str, Any] = {}
    for name in rows[0]:
        values = [row[name] for row in rows if name in row]
        if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
            found[name] = statistics.median(values)
        elif any(value != values[0] for value in values):
            return {}
        else:
            found[name] = values[0]
    return found


def _table(title: str, rows: Mapping[str, Mapping[str, Any]]) -> ResultTable:
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    # The rows of a list have numbers, and are called by their own words.
    words = [column for column in columns if all(isinstance(row.get(column, ""), str) for row in rows.values())]
    if all(name.isdigit() for name in rows) and words:
        named = [", ".join(str(row[word]) for word in words if row.get(word)) for row in rows.values()]
        columns = [column for column in columns if column not in words]
    else:
        named = list(rows)
    cells = [[row.get(column) for column in columns] for row in rows.values()]
    return ResultTable(title=title, columns=columns, rows=list(zip(named, cells, strict=True)))
