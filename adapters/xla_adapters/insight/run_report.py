"""`RunReport`: what a training has done, as objects, as text and as a page."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from xla_adapters.insight.transfer_lines import TransferLine
from xla_adapters.tracing.compile_events import CompileEvent
from xla_adapters.utils import in_bytes
from xla_adapters.utils.pages import page as render
from xla_adapters.utils.pages import templates

_SCRIPT = re.compile("<script.*?</script>", re.DOTALL)
# Colours are variables of the page's style sheet, so that charts follow light and dark.
_COLOURS = tuple(f"var(--chart-{number})" for number in range(1, 3))


def can_draw() -> bool:
    """Whether pygal is installed."""
    return find_spec("pygal") is not None


def bars(values: Sequence[tuple[str, float]], unit: str) -> str:
    """Horizontal bars, the first on top.

    Args:
        values: names and numbers.
        unit: of the numbers, in words.
    """
    if not values or not can_draw():
        return ""
    import pygal

    chart = pygal.HorizontalBar(**_options(unit), height=60 + 26 * len(values), show_legend=False)
    chart.x_labels = [name for name, _ in reversed(values)]
    chart.add(unit, [round(value, 4) for _, value in reversed(values)])
    return _drawn(chart)


def lines(series: Sequence[tuple[str, Sequence[tuple[float, float]]]], across: str, unit: str) -> str:
    """Lines over a common axis.

    Args:
        series: names, and the points of each.
        across: what the axis is, in words.
        unit: of the numbers, in words.
    """
    if not can_draw() or not any(points for _, points in series):
        return ""
    import pygal

    chart = pygal.XY(
        **_options(unit), height=280, x_title=across, show_dots=False, legend_at_bottom=True, include_x_axis=True
    )
    for name, points in series:
        chart.add(name, list(points))
    return _drawn(chart)


def _options(unit: str) -> dict[str, Any]:
    from pygal.style import Style

    style = Style(
        background="transparent",
        plot_background="transparent",
        foreground="var(--text)",
        foreground_strong="var(--text)",
        foreground_subtle="var(--line)",
        guide_stroke_color="var(--line)",
        major_guide_stroke_color="var(--line)",
        colors=_COLOURS,
        font_family="inherit",
        label_font_size=12,
        major_label_font_size=12,
        title_font_size=12,
        legend_font_size=12,
    )
    # Without its scripts, which it would load from the web.
    return {"style": style, "js": (), "width": 720, "title": unit, "explicit_size": False, "margin": 10, "max_scale": 6}


def _drawn(chart: Any) -> str:
    svg = _SCRIPT.sub("", chart.render(is_unicode=True, disable_xml_declaration=True))
    return f'<figure class="wide">{svg}</figure>'


class Preflight(Protocol):
    """What a report shows of a pre-flight, of the tool of that name."""

    @property
    def topology(self) -> str:
        """The slice of TPUs that the steps were compiled for."""

    @property
    def verdict(self) -> str:
        """Whether the training fits it, in a line."""

    def as_values(self) -> dict[str, Any]:
        """Plain values, for JSON."""

    def section(self) -> str:
        """The details as HTML."""


# Rows of a table; of more, the first and a line that says how many are left out.
_ROWS = 100
# At most, where a report is the value of a notebook's cell or of a prompt's expression.
_LINES = 15


def page(report: Mapping[str, Any], curve: Sequence[Mapping[str, float]], preflight: Preflight | None = None) -> str:
    """The report as one HTML file that needs no other.

    Args:
        report: as `RunReport.as_dict`.
        curve: as `RunReport.curve`.
        preflight: as `RunReport.preflight`.
    """
    drawn = ("median", "slowest") if any(point["median"] != point["slowest"] for point in curve) else ("slowest",)
    measured = [event for event in report["compiles"] if event["memory"] is not None]
    largest = max(measured, key=lambda event: event["memory"]["total"], default=None)
    memory: Mapping[str, int] = {} if largest is None else largest["memory"]
    kinds = [(name, memory.get(name, 0) / (1 << 20)) for name in ("inputs", "outputs", "temporaries", "code")]
    templates().filters.update(
        number="{:,}".format, size=in_bytes, seconds=_seconds, percent="{:.1%}".format, rate=_rate
    )
    return render(
        "insight/report.html",
        report=report,
        preflight=preflight,
        limit=_ROWS,
        can_draw=can_draw(),
        bars=bars,
        lines=lines,
        wall=sorted(report["wall"].items(), key=lambda item: -item[1]),
        curves=[
            (name if len(drawn) > 1 else "step", [(point["step"], point[name]) for point in curve]) for name in drawn
        ],
        compile_times=[
            (f"{event['step']} {event['number']}", event["seconds"]) for event in report["compiles"][:_ROWS]
        ],
        reasons=[(item["name"], times, why) for item in report["programs"] for why, times in item["reasons"].items()],
        largest=largest,
        buckets=_buckets,
        memory_kinds=[(name, size) for name, size in kinds if size],
    )


def _buckets(shapes: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The share of padding in each bucket, for a chart."""
    return [
        (f"up to {item['length']}: {item['samples']:,} samples", 100 * (1 - item["elements"] / item["padded"]))
        for item in shapes["buckets"]
        if item["padded"]
    ]


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _rate(rate: float | None) -> str:
    """In digits, or with a prefix of the SI from a million on."""
    if rate is None:
        return "unknown"
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if rate >= factor:
            return f"{rate / factor:.4g} {prefix}"
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"


@dataclass(frozen=True, kw_only=True)
class StepSummary:
    """The calls of one step.

    Attributes:
        name: of the step.
        calls: how many there were.
        replays: how many of them were replayed.
        reasons: why others were traced that might have been replayed, with how often.
    """

    name: str
    calls: int
    replays: int
    reasons: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """A training in numbers. `str()` gives it as text.

    Attributes:
        about: what was trained and how it ended.
        wall: seconds by what the loop did; together they are the wall time of the training.
        host_cpu_seconds: CPU time of the thread that trains.
        steps: their number, percentiles of their times in seconds, and the slow ones.
        curve: the times of the steps in groups, for a chart.
        rates: goodput (the share of the wall time that steps have), steps, samples and tokens per second, FLOPs per
            second, and MFU. Rates leave out set-up, compiles, evaluations and saves; None is unknown.
        counts: compiles, executions, transfers and eager operations in all; empty until the training has ended.
        compiles: each compile.
        programs: the steps, replayed or traced, and why.
        checkpoints: step, path and seconds of each save.
        transfers: copies between host and device by line: all those of the trainer, and those of callbacks that were
            looked at.
        transfers_looked_at: in how many steps the callbacks were looked at.
        memory: of the device, in bytes, if it tells.
        plan: how the model is sharded, in words; empty if it is not.
        shapes: of batches that have few, as `Shapes.as_values` of the room `data`.
        preflight: the pre-flight that was made for it, if there was one.
    """

    about: dict[str, Any]
    wall: dict[str, float]
    host_cpu_seconds: float
    steps: dict[str, Any]
    curve: list[dict[str, float]]
    rates: dict[str, float | None]
    counts: dict[str, int]
    compiles: list[CompileEvent]
    programs: list[StepSummary]
    checkpoints: list[dict[str, Any]]
    transfers: list[TransferLine]
    transfers_looked_at: int
    memory: dict[str, float]
    plan: str
    shapes: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    preflight: Preflight | None = None

    @property
    def wall_seconds(self) -> float:
        """The wall time."""
        return sum(self.wall.values())

    def as_dict(self) -> dict[str, Any]:
        """All of it but the curve, as JSON has it."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "curve"}
        values["compiles"] = [event.as_dict() for event in self.compiles]
        values["preflight"] = None if self.preflight is None else self.preflight.as_values()
        values["transfers"] = [dataclasses.asdict(item) for item in self.transfers]
        values["programs"] = [dataclasses.asdict(program) for program in self.programs]
        return {**values, "wall_seconds": self.wall_seconds}

    def __repr__(self) -> str:
        lines = str(self).splitlines()
        if len(lines) > _LINES:
            lines[_LINES - 1 :] = [f"... and {len(lines) - _LINES + 1} more lines: print it to see all"]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The page in a frame of its own, for notebooks."""
        whole = html.escape(page(self.as_dict(), self.curve, self.preflight))
        return f'<iframe srcdoc="{whole}" width="100%" height="600" style="border: 0"></iframe>'

    def write_page(self, path: Path) -> None:
        """Writes the page, whole or not at all; a file that cannot be written is a warning."""
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            draft.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(page(self.as_dict(), self.curve, self.preflight), encoding="utf-8")
            draft.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                draft.unlink()
            warnings.warn(f"{path.name} could not be written: {error}", stacklevel=2)

    def __str__(self) -> str:
        wall = max(self.wall_seconds, 1e-9)
        lines = [f"{self.steps['steps']} steps in {wall:.1f} s"]
        lines += [
            f"  {name:<16} {seconds:9.2f} s  {100 * seconds / wall:5.1f}%"
            for name, seconds in sorted(self.wall.items(), key=lambda item: -item[1])
        ]
        if "p50" in self.steps:
            times = ", ".join(f"{name} {self.steps[name]:.4f} s" for name in ("p50", "p90", "p99", "slowest"))
            lines.append(f"step times: {times}")
        for name, rate in self.rates.items():
            lines.append(f"{name}: {_rate(rate)}")
        lines += [f"{name}: {number}" for name, number in self.counts.items()]
        lines += [f"{name}: {in_bytes(size)}" for name, size in self.memory.items()]
        for program in self.programs:
            lines.append(f"{program.name}: {program.calls} calls, {program.replays} replayed")
            lines += [f"  traced {times} times: {reason}" for reason, times in program.reasons.items()]
        lines += [str(event) for event in self.compiles]
        lines += [f"saved {save['path']} at step {save['step']}: {save['seconds']:.2f} s" for save in self.checkpoints]
        if self.transfers:
            lines.append(f"transfers by line; in callbacks seen in {self.transfers_looked_at} steps:")
        lines += [
            f"  {item.line or 'elsewhere'}: {item.count} {item.direction} by {item.call}, {in_bytes(item.bytes)}"
            for item in self.transfers
        ]
        if self.plan:
            lines.append(self.plan)
        for shapes in self.shapes:
            buckets = ", ".join(f"{item['samples']} up to {item['length']}" for item in shapes["buckets"])
            lines.append(f"lengths of {shapes['name']}, {shapes['of']}: {buckets}; {shapes['waste']:.0%} is padding")
        if self.preflight is not None:
            lines.append(f"pre-flight for {self.preflight.topology}: {self.preflight.verdict}")
        return "\n".join(lines)
