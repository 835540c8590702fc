"""Draws a sharding plan as text or HTML: the mesh, and which device holds which slice of a tensor.

Colours are those that colour-blind people can distinguish (Okabe and Ito, "Color Universal Design", 2008), with labels
of enough contrast (WCAG 2.1, success criterion 1.4.3).
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

from xla_adapters.errors import ConfigError
from xla_adapters.sharding.mesh import Mesh, Spec, axes_of, render, used_axes
from xla_adapters.sharding.plan_data import ParameterPlan, PlanData
from xla_adapters.sharding.plan_report import Fold, check_width, fold, ranges
from xla_adapters.utils.pages import page

# Colours of slices, each with that of its labels.
PALETTE = {
    "#56B4E9": "#000000",
    "#E69F00": "#000000",
    "#009E73": "#000000",
    "#F0E442": "#000000",
    "#0072B2": "#FFFFFF",
    "#D55E00": "#000000",
    "#CC79A7": "#000000",
    "#000000": "#FFFFFF",
}

# If a grid would have more rows than this, its longest axis becomes the columns.
_TALLEST = 32
# A mesh of a single axis is drawn in several rows if it has more devices than this.
_LONGEST = 16
_FOLDED = 8


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A slice of a tensor, and the devices that hold it.

    Attributes:
        index: its position along each dimension, in slices.
        bounds: start and end along each dimension, in elements.
        whole: the shape of the tensor.
        devices: ids of the devices, each of which holds a copy.
    """

    index: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]
    whole: tuple[int, ...]
    devices: tuple[int, ...]

    def __str__(self) -> str:
        parts = (
            ":" if (start, end) == (0, size) else f"{start}:{end}"
            for (start, end), size in zip(self.bounds, self.whole, strict=True)
        )
        return f"[{', '.join(parts)}]"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A labelled grid for drawing.

    Attributes:
        cells: rows of device ids or slice numbers.
        rows, columns: the labels.
    """

    cells: tuple[tuple[int, ...], ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]

    def panels(self, widest: int) -> tuple[Grid, ...]:
        """Splits the grid into grids of at most `widest` columns, which are drawn below each other."""
        starts = range(0, len(self.columns), max(1, widest))
        return tuple(
            Grid(
                cells=tuple(row[start : start + widest] for row in self.cells),
                rows=self.rows,
                columns=self.columns[start : start + widest],
            )
            for start in starts
        )


def slices(mesh: Mesh, shape: Sequence[int], spec: Spec) -> tuple[Slice, ...]:
    """All different slices of a tensor, in row-major order.

    Device ids count through the mesh in row-major order. If a dimension is split over several axes, the first is the
    outermost, as in torch_xla's partition specs.

    Raises:
        ConfigError: an axis is unknown.
    """
    parts = [mesh.parts(dim) for dim in spec]
    holders: dict[tuple[int, ...], list[int]] = {
        index: [] for index in itertools.product(*(range(count) for count in parts))
    }
    for device in range(mesh.size):
        place = [int(number) for number in np.unravel_index(device, mesh.shape)]
        index = []
        for dim in spec:
            number = 0
            for axis in axes_of(dim):
                number = number * mesh.axis_size(axis) + place[mesh.axis_names.index(axis)]
            index.append(number)
        holders[tuple(index)].append(device)
    # XLA splits an uneven dimension into shards of equal size; the last ones are shorter.
    local = mesh.local_shape(tuple(shape), spec)
    return tuple(
        Slice(
            index=index,
            bounds=tuple(
                (min(number * step, size), min((number + 1) * step, size))
                for number, step, size in zip(index, local, shape, strict=True)
            ),
            whole=tuple(shape),
            devices=tuple(devices),
        )
        for index, devices in holders.items()
    )


def slice_numbers(parts: Sequence[Slice]) -> dict[int, int]:
    """By device id, the number of the slice that the device holds."""
    return {device: number for number, part in enumerate(parts) for device in part.devices}


def mesh_grid(mesh: Mesh) -> Grid:
    """A mesh as a grid: the last axis is the columns, the others are the rows; axes of length 1 are left out."""
    long_axes = [axis for axis, size in enumerate(mesh.shape) if size > 1] or [len(mesh.shape) - 1]
    across = long_axes[-1]
    if mesh.size // mesh.shape[across] > _TALLEST:
        across = max(long_axes, key=lambda axis: mesh.shape[axis])
    if len(long_axes) == 1 and mesh.size > _LONGEST:
        rows = [tuple(range(start, min(start + _FOLDED, mesh.size))) for start in range(0, mesh.size, _FOLDED)]
        name = mesh.axis_names[across]
        return Grid(
            cells=tuple(rows),
            rows=tuple(f"{name}={row[0]}-{row[-1]}" if len(row) > 1 else f"{name}={row[0]}" for row in rows),
            columns=("",) * _FOLDED,
        )
    down = [axis for axis in long_axes if axis != across]
    others = [axis for axis in range(len(mesh.shape)) if axis not in long_axes]
    ids = np.arange(mesh.size).reshape(mesh.shape).transpose([*others, *down, across]).reshape(-1, mesh.shape[across])
    places = itertools.product(*(range(mesh.shape[axis]) for axis in down))
    return Grid(
        cells=_as_rows(ids),
        rows=tuple(
            " ".join(f"{mesh.axis_names[axis]}={number}" for axis, number in zip(down, place, strict=True))
            for place in places
        ),
        columns=tuple(f"{mesh.axis_names[across]}={number}" for number in range(mesh.shape[across])),
    )


def tensor_grid(parts: Sequence[Slice], widest: int) -> Grid:
    """The slices of a tensor as a grid: the last split dimension is the columns, the others are the rows."""
    counts = [max(part.index[dim] for part in parts) + 1 for dim in range(len(parts[0].index))]
    split = [dim for dim, count in enumerate(counts) if count > 1]
    if not split:
        return Grid(cells=((0,),), rows=("",), columns=("",))
    last = split[-1]
    if len(split) == 1 and (last != len(counts) - 1 or counts[last] > widest):
        # A single split dimension goes down if it is not the last, and in several columns if it is too long.
        width = 1 if counts[last] <= widest and len(counts) > 1 else widest
        numbers = np.arange(math.ceil(len(parts) / width) * width).reshape(-1, width)
        if width == 1:
            return Grid(cells=_as_rows(numbers), rows=tuple(_bounds(part, last) for part in parts), columns=("",))
        cells = tuple(tuple(number for number in row if number < len(parts)) for row in _as_rows(numbers))
        rows = tuple(f"{parts[row[0]].bounds[last][0]}:{parts[row[-1]].bounds[last][1]}" for row in cells)
        return Grid(cells=cells, rows=rows, columns=("",) * width)
    columns = counts[last]
    cells = _as_rows(np.arange(len(parts)).reshape(-1, columns))
    return Grid(
        cells=cells,
        rows=tuple(" ".join(_bounds(parts[row[0]], dim) for dim in split[:-1]) for row in cells),
        columns=tuple(_bounds(parts[number], last) for number in cells[0]),
    )


def _bounds(part: Slice, dim: int) -> str:
    start, end = part.bounds[dim]
    return f"{start}:{end}"


def _as_rows(ids: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(number) for number in row) for row in ids)


# Cells in a row of a page.
_WIDEST = 16


class _Cell(NamedTuple):
    """A cell of a drawn grid: its slice (which decides the colour), texts inside and below, and a tooltip."""

    slice: int
    label: str
    below: str
    hint: str


def _drawn(
    mesh: Mesh, parts: Sequence[Slice], describe: Callable[[Slice], str] = str
) -> list[tuple[str, tuple[Grid, ...], Callable[[int], _Cell]]]:
    """Title, grid and cells of the mesh and of a tensor; cells of one slice have one colour.

    Args:
        mesh: the devices.
        parts: the slices of the tensor.
        describe: returns a slice as text.
    """
    number = slice_numbers(parts)

    def of_device(device: int) -> _Cell:
        held = number[device]
        return _Cell(held, str(device), f"s{held}", f"device {device}: s{held} {describe(parts[held])}")

    def of_slice(index: int) -> _Cell:
        holders = ranges(parts[index].devices)
        return _Cell(index, f"s{index}", holders, f"s{index} {describe(parts[index])}: devices {holders}")

    return [
        ("devices (number, slice)", mesh_grid(mesh).panels(_WIDEST), of_device),
        ("tensor (slice, devices)", tensor_grid(parts, _WIDEST).panels(_WIDEST), of_slice),
    ]


Form = Literal["text", "html"]

# With more devices than this, rows are drawn on one line each, without lines in between.
_ROOMY = 64
# Of more slices than this, only the first and last are listed.
_LISTED = 32
_ENDS = 6


def visualize(plan: PlanData, parameter: str | None = None, *, form: Form = "text") -> str:
    """Draws a plan, or one parameter.

    Args:
        plan: the plan.
        parameter: draw only this one, by any of its names.
        form: `"text"` or `"html"` (always of the whole plan).

    Raises:
        ConfigError: the form or the parameter is unknown, or one parameter is asked for as HTML.
    """
    if form not in get_args(Form):
        raise ConfigError(f"form={form!r} is not a valid value; valid values: {', '.join(map(repr, get_args(Form)))}")
    if form == "html":
        if parameter is not None:
            raise ConfigError(f"an HTML page shows the whole plan; for {parameter!r} alone use form='text'")
        return as_html(plan)
    return as_text(plan, parameter)


def as_text(plan: PlanData, parameter: str | None = None, *, width: int = 110) -> str:
    """The mesh as a grid of device numbers, each with the slice it holds.

    Args:
        plan: to draw.
        parameter: to draw; None for the batch and one picture per distinct spec.
        width: the maximal number of characters per line, at least 60; a wide mesh is drawn in several parts.

    Raises:
        ConfigError: the plan has no such parameter, or `width` is under 60.
    """
    check_width(width)
    mesh = plan.mesh
    if parameter is not None:
        entry = plan.parameter(parameter)
        lines = [*textwrap.wrap(_mesh_line(mesh), width), "", *_tensor_text(mesh, entry, [entry.name], width)]
        return "\n".join(lines) + "\n"
    lines = textwrap.wrap(f"Sharding plan {plan.name}: {_mesh_line(mesh)}", width)
    lines += ["", *textwrap.wrap(f"batch: {_batch_line(plan)}; each device with the part of the batch it gets", width)]
    lines += _grid_text(mesh_grid(mesh), slice_numbers(_batch_slices(plan)), "b", width)
    for folds in _by_spec(plan):
        lines += ["", *_tensor_text(mesh, folds[0].first, [_described(item) for item in folds], width)]
    return "\n".join(lines) + "\n"


def as_html(plan: PlanData) -> str:
    """A page with the mesh, the batch and one section per distinct spec.

    Returns:
        A whole document that stands for itself: no script, nothing from the network.
    """
    sections = [
        {
            "title": _spec_title(folds[0].first.spec),
            "copies": _copies_line(plan.mesh, folds[0].first.spec),
            "entry": folds[0].first,
            "drawn": _drawn(plan.mesh, slices(plan.mesh, folds[0].first.shape, folds[0].first.spec)),
            "folds": folds,
            "count": sum(len(item.parameters) for item in folds),
        }
        for folds in _by_spec(plan)
    ]
    return page(
        "sharding/plan.html",
        plan=plan,
        mesh=_mesh_line(plan.mesh),
        batch=_batch_line(plan),
        drawn=_drawn(plan.mesh, _batch_slices(plan), _batch_part),
        sections=sections,
        palette=PALETTE,
        shape_of=_shape,
        tied=_tied,
    )


def _by_spec(plan: PlanData) -> list[list[Fold]]:
    """Folded parameters grouped by spec, the split ones first; all that are not split are one group."""
    groups: dict[Spec, list[Fold]] = {}
    for item in fold(plan.parameters):
        spec = item.first.spec
        groups.setdefault(spec if plan.mesh.shards(spec) > 1 else (), []).append(item)
    return [groups[spec] for spec in sorted(groups, key=lambda spec: not used_axes(spec))]


def _batch_slices(plan: PlanData) -> tuple[Slice, ...]:
    spec: Spec = (plan.batch,)
    # The size of the batch is not known: each part counts as one row.
    return slices(plan.mesh, (plan.mesh.parts(plan.batch),), spec)


def _batch_part(part: Slice) -> str:
    return f"part {part.index[0] + 1} of {part.whole[0]} of the batch"


def _tensor_text(mesh: Mesh, entry: ParameterPlan, names: Sequence[str], width: int) -> list[str]:
    parts = slices(mesh, entry.shape, entry.spec)
    lines = textwrap.wrap(f"{_spec_title(entry.spec)}: {_copies_line(mesh, entry.spec)}", width)
    for name in names:
        lines += textwrap.wrap(name, width, initial_indent="  ", subsequent_indent="    ")
    if len(parts) == 1:
        return lines
    lines += _grid_text(mesh_grid(mesh), slice_numbers(parts), "s", width)
    shown = [f"s{number} = {part} on {ranges(part.devices)}" for number, part in enumerate(parts)]
    if len(shown) > _LISTED:
        shown = [*shown[:_ENDS], f"... {len(shown) - _ENDS - 1} more in this order", shown[-1]]
    lines += textwrap.wrap(f"{entry.name} {_shape(entry.shape)}:", width)
    return [*lines, *_in_columns(shown, width)]


def _grid_text(grid: Grid, held: dict[int, int], letter: str, width: int) -> list[str]:
    roomy = len(held) <= _ROOMY
    label = max(map(len, grid.rows))
    numbers = max(map(str, held), key=len)
    largest = f"{letter}{max(held.values())}"
    inner = max(len(numbers), len(largest)) if roomy else len(numbers) + 1 + len(largest)
    inner = max(inner, len(str(len(grid.columns) - 1)))
    axis = grid.columns[0].partition("=")[0]
    lines = [" " * label + f"  {axis}"] if axis else []
    panels = grid.panels((width - label - 2) // (inner + 3))
    for panel in panels:
        short = [column.rpartition("=")[2] for column in panel.columns]
        if axis:
            lines.append(" " * label + "  " + " ".join(text.center(inner + 2) for text in short).rstrip())
        rule = " " * label + " +" + "+".join("-" * (inner + 2) for _ in short) + "+"
        lines.append(rule)
        for name, row in zip(panel.rows, panel.cells, strict=True):
            cells = [(str(device), f"{letter}{held[device]}") for device in row]
            if roomy:
                lines.append(_line(name.rjust(label), [device for device, _ in cells], inner))
                lines.append(_line(" " * label, [part for _, part in cells], inner))
                lines.append(rule)
            else:
                texts = [f"{device.rjust(len(numbers))}:{part.ljust(len(largest))}" for device, part in cells]
                lines.append(_line(name.rjust(label), texts, inner))
        if not roomy and panel is panels[-1]:
            lines.append(rule)
    return lines


def _line(label: str, cells: Sequence[str], inner: int) -> str:
    return f"{label} |" + "|".join(f" {cell.center(inner)} " for cell in cells) + "|"


def _in_columns(texts: Sequence[str], width: int) -> list[str]:
    size = max(map(len, texts)) + 3
    count = max(1, (width - 2) // size)
    rows = [texts[start : start + count] for start in range(0, len(texts), count)]
    return ["  " + "".join(text.ljust(size) for text in row).rstrip() for row in rows]


def _mesh_line(mesh: Mesh) -> str:
    return f"mesh {mesh} ({mesh.size} devices)"


def _batch_line(plan: PlanData) -> str:
    parts = plan.mesh.parts(plan.batch)
    return f"{parts} parts over {'+'.join(plan.batch)}" if parts > 1 else "every device gets the whole batch"


def _copies_line(mesh: Mesh, spec: Spec) -> str:
    shards = mesh.shards(spec)
    if shards == 1:
        return f"every device holds a whole copy ({mesh.size} copies)"
    copies = mesh.size // shards
    return f"{shards} slices, " + ("one copy of each" if copies == 1 else f"{copies} copies of each")


def _spec_title(spec: Spec) -> str:
    return f"split over {render(spec)}" if used_axes(spec) else "not split"


def _described(item: Fold) -> str:
    return f"{item.name} {_shape(item.first.shape)}{_tied(item)}"


def _tied(item: Fold) -> str:
    return "".join(f", = {name}" for name in item.first.tied)


def _shape(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})"
