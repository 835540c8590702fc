"""Charts for the report, drawn by pygal as SVG; empty where it is not installed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

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
