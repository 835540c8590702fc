"""`report`: describes a sharding plan as text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable

from xla_adapters.sharding.folding import fold
from xla_adapters.sharding.mesh import Mesh, render
from xla_adapters.sharding.plan_data import ParameterPlan, PlanCost, PlanData
from xla_adapters.sharding.tables import check_width, table
from xla_adapters.sharding.units import UNITS_NOTE, dtype_bytes, human_bytes, human_seconds, ratio


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
