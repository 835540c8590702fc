"""Dictionaries that keep a limited number of entries."""

from __future__ import annotations

from typing import Any


def make_room(kept: dict[bytes, Any], most: int) -> None:
    """Drops the oldest entries, so that one more makes at most `most`."""
    while len(kept) >= most:
        del kept[next(iter(kept))]
