"""Draws grids as SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from xla_adapters.sharding.colours import INK, PAPER, colour_of, label_on
from xla_adapters.sharding.folding import ranges
from xla_adapters.sharding.mesh import Mesh
from xla_adapters.sharding.slices import Grid, Slice, mesh_grid, slice_numbers, tensor_grid

_COLUMNS = 16
_GAP = 24
_TITLE = 22
_FONT = "font-family=\"ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace\""
_SMALLEST = 8.0
# Width of a character at font size 1, for fonts of one width.
_CHARACTER = 0.62


@dataclass(frozen=True)
class _Drawing:
    """A part of a picture, with its size in pixels."""

    body: str
    width: float
    height: float


@dataclass(frozen=True)
class _Cell:
    """A cell of a drawn grid: its slice (which decides the colour), texts inside and below, and a tooltip."""

    slice: int
    label: str
    below: str
    hint: str


def draw(mesh: Mesh, parts: Sequence[Slice], *, title: str, describe: Callable[[Slice], str] = str) -> str:
    """Draws the mesh and a tensor side by side; cells of one slice have one colour.

    Args:
        mesh: the devices.
        parts: the slices of the tensor.
        title: the text alternative for screen readers.
        describe: returns a slice as text.

    Returns:
        An `<svg>` element without external resources.
    """
    number = slice_numbers(parts)

    def of_device(device: int) -> _Cell:
        held = number[device]
        return _Cell(held, str(device), f"s{held}", f"device {device}: s{held} {describe(parts[held])}")

    def of_slice(index: int) -> _Cell:
        holders = ranges(parts[index].devices)
        return _Cell(index, f"s{index}", holders, f"s{index} {describe(parts[index])}: devices {holders}")

    devices = _grid(mesh_grid(mesh), of_device, "devices (number, slice)")
    tensor = _grid(tensor_grid(parts, _COLUMNS), of_slice, "tensor (slice, devices)")
    width, height = devices.width + 2 * _GAP + tensor.width, max(devices.height, tensor.height)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" {_FONT}><title>{escape(title)}</title>'
        f'<rect width="100%" height="100%" fill="{PAPER}"/>{devices.body}'
        f'<g transform="translate({devices.width + 2 * _GAP:.0f} 0)">{tensor.body}</g></svg>\n'
    )


def _grid(grid: Grid, cell_of: Callable[[int], _Cell], title: str) -> _Drawing:
    size = _cell_size(sum(map(len, grid.cells)))
    font = min(12.0, size * 0.36)
    margin = max(map(len, grid.rows)) * 11 * _CHARACTER + 8
    axis, found, _ = grid.columns[0].partition("=")
    title += f", columns: {axis}" if found and len(grid.columns) > 1 else ""
    parts = [_text(margin, 14, title, 12, anchor="start")]
    top, widest = float(_TITLE), margin + len(title) * 12 * _CHARACTER
    for panel in grid.panels(_COLUMNS):
        if any(panel.columns):
            labels, line = _column_labels(panel.columns, size)
            for column, label in enumerate(labels):
                parts.append(_text(margin + (column + 0.5) * size, top + 12, label, line))
            top += 18
        for row, cells in enumerate(panel.cells):
            middle = top + (row + 0.5) * size
            if panel.rows[row]:
                parts.append(_text(margin - 6, middle + 4, panel.rows[row], 11, anchor="end"))
            for column, number in enumerate(cells):
                parts.append(_cell(cell_of(number), margin + column * size, top + row * size, size, font))
        top += len(panel.cells) * size + 8
        widest = max(widest, margin + len(panel.columns) * size + 2)
    return _Drawing("".join(parts), widest, top)


def _cell_size(count: int) -> float:
    """Cells shrink with their number, to a size at which three digits can still be read."""
    return 56.0 if count <= 32 else 44.0 if count <= 64 else 34.0


def _column_labels(labels: Sequence[str], size: float) -> tuple[list[str], float]:
    """Labels that fit over their columns: a number without its axis, a range without its end where they do not."""
    font = min(11.0, size * 0.36)
    if max(map(len, labels)) * font * _CHARACTER <= size:
        return list(labels), font
    short = [label.rpartition("=")[2] for label in labels]
    if max(map(len, short)) * _SMALLEST * _CHARACTER > size:
        short = [label.partition(":")[0] + ":" for label in short]
    longest = max(map(len, short))
    return short, max(_SMALLEST, min(font, size / (longest * _CHARACTER)))


def _cell(cell: _Cell, left: float, top: float, size: float, font: float) -> str:
    fill = colour_of(cell.slice)
    ink = label_on(fill)
    below = cell.below if len(cell.below) * font * 0.85 * _CHARACTER <= size else "..."
    return (
        f'<g><title>{escape(cell.hint)}</title><rect x="{left:.1f}" y="{top:.1f}" width="{size:.0f}" '
        f'height="{size:.0f}" fill="{fill}" stroke="{PAPER}" stroke-width="2"/>'
        + _text(left + size / 2, top + size * 0.46, cell.label, font, ink=ink)
        + _text(left + size / 2, top + size * 0.80, below, font * 0.85, ink=ink)
        + "</g>"
    )


def _text(x: float, y: float, text: str, size: float, *, ink: str = INK, anchor: str = "middle") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:.1f}" fill="{ink}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )
