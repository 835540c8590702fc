"""Draws a sharding plan as text, SVG or HTML: the mesh, and which device holds which slice of a tensor."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Sequence
from html import escape
from typing import Literal, get_args

from xla_adapters.errors import ConfigError
from xla_adapters.sharding.colours import INK, PAPER
from xla_adapters.sharding.folding import Fold, fold, ranges
from xla_adapters.sharding.mesh import Mesh, Spec, render, used_axes
from xla_adapters.sharding.plan_data import ParameterPlan, PlanData
from xla_adapters.sharding.slices import Grid, Slice, mesh_grid, slice_numbers, slices
from xla_adapters.sharding.svg import draw
from xla_adapters.sharding.tables import check_width

Form = Literal["text", "svg", "html"]

# With more devices than this, rows are drawn on one line each, without lines in between.
_ROOMY = 64
# Of more slices than this, only the first and last are listed.
_LISTED = 32
_ENDS = 6
_STYLE = (
    f"body{{font:15px/1.5 system-ui,sans-serif;color:{INK};background:{PAPER};margin:2em auto;max-width:75em;"
    "padding:0 1em}code,pre,td{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:13px}"
    "figure{overflow:auto;max-height:40em;margin:1em 0}table{border-collapse:collapse;display:block;overflow:auto}"
    "td,th{text-align:left;padding:.15em 1em .15em 0;border-bottom:1px solid #767676}"
)


def visualize(plan: PlanData, parameter: str | None = None, *, form: Form = "text") -> str:
    """Draws a plan, or one parameter.

    Args:
        plan: the plan.
        parameter: draw only this one, by any of its names.
        form: `"text"`, `"svg"` or `"html"` (always of the whole plan).

    Raises:
        ConfigError: the form or the parameter is unknown, or one parameter is asked for as HTML.
    """
    if form not in get_args(Form):
        raise ConfigError(f"form={form!r} is not a valid value; valid values: {', '.join(map(repr, get_args(Form)))}")
    if form == "html":
        if parameter is not None:
            raise ConfigError(f"an HTML page shows the whole plan; for {parameter!r} alone use form='svg' or 'text'")
        return as_html(plan)
    return as_text(plan, parameter) if form == "text" else as_svg(plan, parameter)


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
        entry = _find(plan, parameter)
        lines = [*textwrap.wrap(_mesh_line(mesh), width), "", *_tensor_text(mesh, entry, [entry.name], width)]
        return "\n".join(lines) + "\n"
    lines = textwrap.wrap(f"Sharding plan {plan.name}: {_mesh_line(mesh)}", width)
    lines += ["", *textwrap.wrap(f"batch: {_batch_line(plan)}; each device with the part of the batch it gets", width)]
    lines += _grid_text(mesh_grid(mesh), slice_numbers(_batch_slices(plan)), "b", width)
    for folds in _by_spec(plan):
        lines += ["", *_tensor_text(mesh, folds[0].first, [_described(item) for item in folds], width)]
    return "\n".join(lines) + "\n"


def as_svg(plan: PlanData, parameter: str | None = None) -> str:
    """Draws the mesh and a tensor side by side as SVG; cells of one slice have one colour.

    Args:
        plan: to draw.
        parameter: to draw; None for the batch.

    Returns:
        An `<svg>` element without scripts or external resources.

    Raises:
        ConfigError: the plan has no such parameter.
    """
    if parameter is None:
        title = f"{_mesh_line(plan.mesh)}; batch: {_batch_line(plan)}"
        return draw(plan.mesh, _batch_slices(plan), title=title, describe=_batch_part)
    return _parameter_svg(plan.mesh, _find(plan, parameter))


def as_html(plan: PlanData) -> str:
    """A page with the mesh, the batch and one section per distinct spec.

    Returns:
        A whole document that stands for itself: no script, nothing from the network.
    """
    sections = []
    for folds in _by_spec(plan):
        rows = "".join(
            f"<tr><td>{escape(item.name)}{escape(_tied(item))}</td><td>{escape(_shape(item.first.shape))}</td>"
            f"<td>{escape(item.first.dtype)}</td><td>{escape(item.first.decided_by)}</td></tr>"
            for item in folds
        )
        entry = folds[0].first
        copies = _copies_line(plan.mesh, entry.spec)
        sections.append(
            f"<section><h2>{escape(_spec_title(entry.spec))}</h2><p>{escape(copies)}</p>"
            f"<figure>{_parameter_svg(plan.mesh, entry)}<figcaption>Drawn: <code>{escape(entry.name)}</code> "
            f"{escape(_shape(entry.shape))}</figcaption></figure><details open><summary>"
            f"{sum(len(item.parameters) for item in folds)} parameters</summary><table><tr><th>parameter</th>"
            f"<th>whole shape</th><th>dtype</th><th>decided by</th></tr>{rows}</table></details></section>\n"
        )
    notes = "".join(f"<li>{escape(note)}</li>" for note in plan.notes)
    title = f"Sharding plan {plan.name}"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n<h1>{escape(title)}</h1><p>{escape(_mesh_line(plan.mesh))}</p>"
        f"{f'<ul>{notes}</ul>' if notes else ''}\n<section><h2>Batch</h2><p>{escape(_batch_line(plan))}</p>"
        f"<figure>{as_svg(plan)}</figure></section>\n{''.join(sections)}</body></html>\n"
    )


def _by_spec(plan: PlanData) -> list[list[Fold]]:
    """Folded parameters grouped by spec, the split ones first; all that are not split are one group."""
    groups: dict[Spec, list[Fold]] = {}
    for item in fold(plan.parameters):
        spec = item.first.spec
        groups.setdefault(spec if plan.mesh.shards(spec) > 1 else (), []).append(item)
    return [groups[spec] for spec in sorted(groups, key=lambda spec: not used_axes(spec))]


def _find(plan: PlanData, parameter: str) -> ParameterPlan:
    for entry in plan.parameters:
        if parameter == entry.name or parameter in entry.tied:
            return entry
    names = [name for entry in plan.parameters for name in (entry.name, *entry.tied)]
    close = difflib.get_close_matches(parameter, names, n=3, cutoff=0)
    raise ConfigError(f"the plan {plan.name!r} has no parameter {parameter!r}; near: {', '.join(close) or 'none'}")


def _batch_slices(plan: PlanData) -> tuple[Slice, ...]:
    spec: Spec = (plan.batch,)
    # The size of the batch is not known: each part counts as one row.
    return slices(plan.mesh, (plan.mesh.parts(plan.batch),), spec)


def _batch_part(part: Slice) -> str:
    return f"part {part.index[0] + 1} of {part.whole[0]} of the batch"


def _parameter_svg(mesh: Mesh, entry: ParameterPlan) -> str:
    title = f"{entry.name} {_shape(entry.shape)} {render(entry.spec)}: {_copies_line(mesh, entry.spec)}"
    return draw(mesh, slices(mesh, entry.shape, entry.spec), title=title)


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
