"""Colours that colour-blind people can distinguish, and readable labels on them.

Source: Okabe and Ito, "Color Universal Design" (2008); contrast as in WCAG 2.1, success criterion 1.4.3.
"""

from __future__ import annotations

PALETTE = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#000000")
INK, PAPER = "#000000", "#FFFFFF"
# WCAG's least contrast of text.
LEAST_CONTRAST = 4.5


def colour_of(number: int) -> str:
    """The colour of slice `number`. Colours repeat after eight, so cells are labelled, too."""
    return PALETTE[number % len(PALETTE)]


def label_on(background: str) -> str:
    """Black or white, whichever has more contrast to the background; one of them always reaches 4.5:1."""
    return max((INK, PAPER), key=lambda ink: contrast(ink, background))


def contrast(one: str, other: str) -> float:
    """Contrast of two colours (`"#rrggbb"`), from 1 to 21."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
