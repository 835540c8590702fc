"""Plain-text tables with a maximal width."""

from __future__ import annotations

from collections.abc import Sequence

from xla_adapters.errors import ConfigError

LEAST_WIDTH = 60
_GAP = "  "
_NARROWEST = 4


def check_width(width: object) -> None:
    """Raises if a width is too small.

    Raises:
        ConfigError: it is not an integer of at least 60.
    """
    if isinstance(width, bool) or not isinstance(width, int) or width < LEAST_WIDTH:
        raise ConfigError(f"width={width!r} is not a valid value; valid values: an integer >= {LEAST_WIDTH}")


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, width: int, right: Sequence[int] = ()) -> list[str]:
    """The lines of a table.

    If it is too wide, the widest columns are narrowed first, and their cells are wrapped.

    Args:
        header: the title of each column.
        rows: as many cells as titles.
        width: the maximal number of characters per line.
        right: indices of the columns that are aligned to the right.
    """
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    while sum(widths) + len(_GAP) * (len(widths) - 1) > width and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1
    lines = [line for row in cells for line in _row(row, widths, right)]
    height = len(_row(list(header), widths, right))
    return [*lines[:height], _GAP.join("-" * size for size in widths), *lines[height:]]


def _row(cells: Sequence[str], widths: Sequence[int], right: Sequence[int]) -> list[str]:
    parts = [_wrapped(cell, size) for cell, size in zip(cells, widths, strict=True)]
    lines = []
    for index in range(max(map(len, parts))):
        texts = [part[index] if index < len(part) else "" for part in parts]
        lines.append(
            _GAP.join(
                text.rjust(size) if column in right else text.ljust(size)
                for column, (text, size) in enumerate(zip(texts, widths, strict=True))
            ).rstrip()
        )
    return lines


def _wrapped(text: str, size: int) -> list[str]:
    """The text in pieces of at most `size` characters, split after a dot, comma, space or underscore if possible."""
    pieces = []
    while len(text) > size:
        cut = max(text.rfind(mark, size // 3, size) for mark in "., _") + 1 or size
        pieces.append(text[:cut].rstrip())
        text = text[cut:].lstrip()
    return [*pieces, text]
