"""Why a pass cannot be replayed."""

from __future__ import annotations


class CannotReplay(Exception):
    """A pass cannot be recorded, or a recording does not hold for this pass; the message says why."""
