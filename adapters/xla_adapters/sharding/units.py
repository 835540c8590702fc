"""Formats bytes and seconds for people; bytes per element of dtypes."""

from __future__ import annotations

import torch

from xla_adapters.errors import ConfigError

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
