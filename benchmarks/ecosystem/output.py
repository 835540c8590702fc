"""The table: for a terminal, and as the documents have it."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import report
from benchmarks.ecosystem.cell import Row

_HEADERS = ("trainer", "model", "compiles", "executions", "losses", "weights", "replayed", "1 execution")


def table_of(rows: list[Row]) -> str:
    """The rows, then why some are split or traced."""
    text = report.table(_HEADERS, [_values(row) for row in rows])
    split, traced = _explained(rows, _split), _explained(rows, _traced)
    if split:
        text += "\n\nnot one execution per step, or not equal, and why:\n" + "\n".join(f"  {line}" for line in split)
    if traced:
        text += "\n\nnever replayed, and why:\n" + "\n".join(f"  {line}" for line in traced)
    return text


def markdown(rows: list[Row]) -> str:
    """The same for the documents."""
    text = report.markdown(_HEADERS, [_values(row) for row in rows])
    for title, about in (("Not one execution per step", _split), ("Never replayed", _traced)):
        text += f"\n\n## {title}\n\n" + "\n".join(f"- {line}" for line in _explained(rows, about, code="`"))
    return text


def _values(row: Row) -> tuple[object, ...]:
    replayed = f"{row.replays} of {row.calls}" if row.calls is not None else "no"
    figures = (row.compiles, row.executions, row.loss_difference, row.weight_difference)
    return (row.trainer, row.model, *figures, replayed, row.single_execution)


def _split(row: Row) -> str | None:
    return row.why


def _traced(row: Row) -> str | None:
    """The most frequent reason of those that are given for a cell that is never replayed."""
    if row.replays != 0:
        return None
    return max(row.reasons, key=row.reasons.__getitem__, default="no reason was given")


def _explained(rows: list[Row], about: Callable[[Row], str | None], code: str = "") -> list[str]:
    """A line for each reason, with the cells that it is given for."""
    cells: dict[str, list[str]] = {}
    for row in rows:
        if (reason := about(row)) is not None:
            cells.setdefault(reason, []).append(f"{row.trainer} x {row.model}")
    return [f"{', '.join(names)}: {code}{reason}{code}" for reason, names in cells.items()]
