"""`report`: describes a sharding plan as text.

Equal parameters of repeated layers are one row (`fold`). `table`, `human_bytes` and `human_seconds` are used by other
reports, too.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch

from xla_adapters.errors import ConfigError
from xla_adapters.sharding.mesh import Mesh, render
from xla_adapters.sharding.plan_data import ParameterPlan, PlanCost, PlanData

UNITS_NOTE = "kB = 1e3, MB = 1e6, GB = 1e9 bytes"


def human_bytes(size: float) -> str:
    """Bytes with a decimal unit: `12.3 MB` (MB = 1e6 bytes)."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        # A value that would be rounded to 1000 gets the next unit.
        if abs(size) >= 0.9995 * factor:
            return f"{_three_digits(size / factor)} {unit}"
    return f"{size:.0f} B"


def human_seconds(seconds: float) -> str:
    """Seconds with a unit: `1.25 ms`."""
    if seconds == 0:
        return "0 s"
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= 0.9995 * factor:
            return f"{_three_digits(seconds / factor)} {unit}"
    return f"{_three_digits(seconds / 1e-9)} ns"


def ratio(measured: float, predicted: float) -> str:
    """`measured / predicted` as text; a dash if nothing was predicted."""
    return f"{measured / predicted:.2f}" if predicted else "-"


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element of a torch dtype, by its name (`"float32"`, `"torch.bfloat16"`, `"float8_e4m3fn"`).

    Raises:
        ConfigError: the name is of no dtype.
    """
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"{dtype!r} is no dtype; examples: float32, bfloat16, float8_e4m3fn, int64, bool")
    return found.itemsize


def _three_digits(number: float) -> str:
    digits = 0 if abs(number) >= 99.95 else 1 if abs(number) >= 9.995 else 2
    return f"{number:,.{digits}f}"


LEAST_WIDTH = 60
_BETWEEN_COLUMNS = "  "
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
    while sum(widths) + len(_BETWEEN_COLUMNS) * (len(widths) - 1) > width and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1
    lines = [line for row in cells for line in _table_row(row, widths, right)]
    height = len(_table_row(list(header), widths, right))
    return [*lines[:height], _BETWEEN_COLUMNS.join("-" * size for size in widths), *lines[height:]]


def _table_row(cells: Sequence[str], widths: Sequence[int], right: Sequence[int]) -> list[str]:
    parts = [_wrapped(cell, size) for cell, size in zip(cells, widths, strict=True)]
    lines = []
    for index in range(max(map(len, parts))):
        texts = [part[index] if index < len(part) else "" for part in parts]
        lines.append(
            _BETWEEN_COLUMNS.join(
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


@dataclass(frozen=True, kw_only=True)
class Fold:
    """Equal parameters whose names differ only in the number of a layer.

    Attributes:
        name: with ranges of numbers in braces.
        parameters: in the plan's order.
    """

    name: str
    parameters: tuple[ParameterPlan, ...]

    @property
    def first(self) -> ParameterPlan:
        """The first parameter; all have its shape, dtype and spec."""
        return self.parameters[0]


def fold(parameters: Iterable[ParameterPlan]) -> tuple[Fold, ...]:
    """Folds parameters with equal shape, dtype, spec and `decided_by`, in the order of their first one.

    A tied weight is not folded.
    """
    rows: list[tuple[tuple[str, ...], Hashable, tuple[ParameterPlan, ...]]] = [
        (tuple(entry.name.split(".")), _alike(entry), (entry,)) for entry in parameters
    ]
    positions = max((len(parts) for parts, _, _ in rows), default=0)
    # From the right: first the experts of a layer, then layers whose experts fold in the same way.
    for position in reversed(range(positions)):
        rows = _folded_at(rows, position)
    return tuple(Fold(name=".".join(parts), parameters=members) for parts, _, members in rows)


def _alike(entry: ParameterPlan) -> Hashable:
    return (entry.shape, entry.dtype, entry.spec, entry.decided_by, entry.name if entry.tied else None)


def _folded_at(
    rows: Sequence[tuple[tuple[str, ...], Hashable, tuple[ParameterPlan, ...]]], position: int
) -> list[tuple[tuple[str, ...], Hashable, tuple[ParameterPlan, ...]]]:
    groups: dict[Hashable, list[tuple[tuple[str, ...], Hashable, tuple[ParameterPlan, ...]]]] = {}
    for row in rows:
        parts, alike, _ = row
        key: Hashable = parts
        if position < len(parts) and parts[position].isdecimal():
            key = (*parts[:position], None, *parts[position + 1 :])
        groups.setdefault((key, alike), []).append(row)
    folded = []
    for group in groups.values():
        parts, alike, members = group[0]
        if len(group) > 1:
            numbers = sorted(int(row[0][position]) for row in group)
            parts = (*parts[:position], "{" + ranges(numbers) + "}", *parts[position + 1 :])
            members = tuple(member for row in group for member in row[2])
        folded.append((parts, alike, members))
    return folded


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as text: `0-3,5,8-9`; evenly spaced ones as `0,4,..,252`."""
    if len(numbers) > 3 and numbers[1] - numbers[0] > 1:
        step = numbers[1] - numbers[0]
        if all(after - before == step for before, after in itertools.pairwise(numbers)):
            return f"{numbers[0]},{numbers[1]},..,{numbers[-1]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def report(plan: PlanData, *, width: int = 110) -> str:
    """Describes how a plan splits a model, with its predicted and measured cost.

    Args:
        plan: the plan.
        width: the maximal number of characters per line.

    Returns:
        Plain text. Bytes are per device and in decimal units (MB = 1e6 bytes).

    Raises:
        ConfigError: `width` is under 60, or a parameter's dtype is unknown.
    """
    check_width(width)
    sections = [_header(plan, width), _parameters(plan, width)]
    if plan.activations:
        sections.append(_activations(plan, width))
    if plan.predicted is not None:
        sections += [
            _memory(plan, plan.predicted, width),
            _collectives(plan.predicted, width),
            _step_time(plan.predicted, width),
        ]
    if plan.measured is not None:
        sections.append(_measured(plan, width))
    if plan.alternatives:
        sections.append(_alternatives(plan, width))
    if plan.predicted is None and plan.measured is None:
        sections.append(["Cost: neither predicted nor measured"])
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


def bytes_per_device(entry: ParameterPlan, mesh: Mesh) -> float:
    """Bytes of a parameter's shard on one device, without gradient and optimizer state.

    Raises:
        ConfigError: the dtype is unknown.
    """
    return math.prod(mesh.local_shape(entry.shape, entry.spec)) * dtype_bytes(entry.dtype)


def _header(plan: PlanData, width: int) -> list[str]:
    batch = " and ".join(plan.batch) if plan.batch else "no axis (every device gets the whole batch)"
    lines = [
        f"Sharding plan: {plan.name}",
        f"mesh    {plan.mesh} ({plan.mesh.size} devices)",
        f"batch   split over {batch}",
        f"units   {UNITS_NOTE}; all per device",
    ]
    lines += [f"note    {note}" for note in plan.notes]
    return [part for line in lines for part in textwrap.wrap(line, width, subsequent_indent=" " * 8)]


def _parameters(plan: PlanData, width: int) -> list[str]:
    dtypes = sorted({entry.dtype for entry in plan.parameters})
    rows = []
    whole = local = 0.0
    for item in fold(plan.parameters):
        entry, count = item.first, len(item.parameters)
        shape = f"({', '.join(map(str, entry.shape))})"
        whole += count * math.prod(entry.shape) * dtype_bytes(entry.dtype)
        size = bytes_per_device(entry, plan.mesh) * count
        local += size
        name = "".join([item.name, *(f", = {tied}" for tied in entry.tied)])
        rows.append(
            [
                name,
                shape if len(dtypes) == 1 else f"{entry.dtype} {shape}",
                render(entry.spec),
                human_bytes(size),
                entry.decided_by,
            ]
        )
    rows.append(["total", "", "", human_bytes(local), ""])
    tensors = f"{len(plan.parameters)} tensors"
    summary = f"Parameters: {tensors}, {human_bytes(whole)} in all" + (f", {dtypes[0]}" if len(dtypes) == 1 else "")
    header = ["parameter", "whole shape", "split over", "per device", "decided by"]
    lines = [
        *textwrap.wrap(summary + "; a row of {...} is the sum of its layers", width),
        *table(header, rows, width=width, right=[3]),
    ]
    gathered = [entry.name for entry in plan.parameters if entry.used is not None]
    if gathered:
        lines += textwrap.wrap(f"gathered before use: {_folded_names(gathered)}", width)
    return lines


def _activations(plan: PlanData, width: int) -> list[str]:
    lines = ["Constraints on activations"]
    for kind, what in (("output", "what the module returns"), ("input", "what the module takes")):
        by_spec: dict[str, list[str]] = {}
        for entry in plan.activations:
            if entry.of == kind:
                back = f", gradient {render(entry.gradient)}" if entry.gradient is not None else ""
                by_spec.setdefault(render(entry.spec) + back, []).append(entry.module)
        rows = [[_folded_names(modules), spec] for spec, modules in by_spec.items()]
        if rows:
            lines += table([what, "split over"], rows, width=width)
    return lines


def _folded_names(modules: Iterable[str]) -> str:
    # `fold` takes parameters; only the names matter here.
    entries = [ParameterPlan(name=module, shape=(), dtype="", spec=()) for module in modules]
    return ", ".join(item.name or "(the model)" for item in fold(entries))


def _memory(plan: PlanData, predicted: PlanCost, width: int) -> list[str]:
    measured = plan.measured
    total = predicted.memory_bytes
    rows = [[kind, human_bytes(size), "", ""] for kind, size in predicted.memory.items()]
    if measured is None:
        rows.append(["total", human_bytes(total)])
        rows = [row[:2] for row in rows]
        return ["Memory", *table(["kind", "predicted"], rows, width=width, right=[1])]
    rows.append(["total", human_bytes(total), human_bytes(measured.memory_bytes), ratio(measured.memory_bytes, total)])
    header = ["kind", "predicted", "measured", "measured / predicted"]
    return ["Memory", *table(header, rows, width=width, right=[1, 2, 3])]


def _collectives(predicted: PlanCost, width: int) -> list[str]:
    if not predicted.collectives:
        return ["Collectives, predicted: none"]
    items = sorted(predicted.collectives, key=lambda item: -item.wire_bytes)
    rows = [
        [item.kind, item.axis, f"{item.count:,}", human_bytes(item.wire_bytes), human_seconds(item.seconds), item.cause]
        for item in items
    ]
    count = sum(item.count for item in items)
    seconds = human_seconds(predicted.communication_seconds)
    rows.append(["total", "", f"{count:,}", human_bytes(predicted.wire_bytes), seconds, ""])
    header = ["kind", "over", "count", "sent", "time", "for"]
    return ["Collectives, predicted, per step", *table(header, rows, width=width, right=[2, 3, 4])]


def _step_time(predicted: PlanCost, width: int) -> list[str]:
    causes: dict[str, float] = {}
    for item in predicted.collectives:
        causes[item.cause] = causes.get(item.cause, 0.0) + item.seconds
    parts = [("compute", predicted.compute_seconds)]
    parts += [(f"communication: {cause or 'other'}", seconds) for cause, seconds in causes.items()]
    total = predicted.step_seconds
    rows = [
        [name, human_seconds(seconds), f"{seconds / total:.0%}" if total else "-"]
        for name, seconds in [*parts, ("total", total)]
    ]
    return [
        "Step time, predicted (nothing overlaps)",
        *table(["part", "time", "share"], rows, width=width, right=[1, 2]),
    ]


def _measured(plan: PlanData, width: int) -> list[str]:
    measured, predicted = plan.measured, plan.predicted
    assert measured is not None
    rows = [["sent by collectives", human_bytes(measured.wire_bytes)], ["memory", human_bytes(measured.memory_bytes)]]
    rows += [[f"{kind} (count)", f"{count:,}"] for kind, count in sorted(measured.collectives.items())]
    if predicted is None:
        title = "Measured (the compiled step; nothing was predicted)"
        return [title, *table(["per device and step", "measured"], rows, width=width, right=[1])]
    counts: dict[str, int] = dict.fromkeys(measured.collectives, 0)
    for item in predicted.collectives:
        counts[item.kind] = counts.get(item.kind, 0) + item.count
    rows = [
        [name, human_bytes(expected), human_bytes(found), ratio(found, expected)]
        for name, expected, found in (
            ("sent by collectives", predicted.wire_bytes, measured.wire_bytes),
            ("memory", predicted.memory_bytes, measured.memory_bytes),
        )
    ]
    for kind, count in sorted(counts.items()):
        times = measured.collectives.get(kind, 0)
        rows.append([f"{kind} (count)", f"{count:,}", f"{times:,}", ratio(times, count)])
    header = ["per device and step", "predicted", "measured", "measured / predicted"]
    return ["Prediction and measurement", *table(header, rows, width=width, right=[1, 2, 3])]


def _alternatives(plan: PlanData, width: int) -> list[str]:
    rows = []
    for item in plan.alternatives:
        measured = item.measured
        rows.append(
            [
                item.name,
                item.mesh,
                human_bytes(item.predicted_wire_bytes),
                human_bytes(measured.wire_bytes) if measured is not None else "-",
                human_bytes(item.predicted_memory_bytes),
                human_bytes(measured.memory_bytes) if measured is not None else "-",
                human_seconds(item.seconds),
                item.remark,
            ]
        )
    header = ["plan", "mesh", "sent, predicted", "measured", "memory, predicted", "measured", "step", "remark"]
    title = "Considered (predicted by the cost model; measured in the step that the compiler made of it)"
    return [title, *table(header, rows, width=width, right=[2, 3, 4, 5, 6])]
