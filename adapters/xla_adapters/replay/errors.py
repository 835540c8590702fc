"""Why a pass cannot be replayed."""

from __future__ import annotations


class CannotReplay(Exception):  # noqa: N818 (an answer, never shown as an error)
    """A pass cannot be recorded, or a recording does not hold for this pass; the message says why."""
