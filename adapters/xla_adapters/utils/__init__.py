"""Helpers that do not depend on XLA or on training steps."""

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def in_bytes(size: float) -> str:
    """A size in words: 1.5 MiB."""
    unit = next(((unit, name) for unit, name in _UNITS if size >= unit), None)
    return f"{size:.0f} B" if unit is None else f"{size / unit[0]:.1f} {unit[1]}"
