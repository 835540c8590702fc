"""`CannotReplay`: why a call of a step is not replayed."""

from __future__ import annotations


class CannotReplay(Exception):
    """A call cannot be captured, or a cached call does not apply to it. Internal; the message is shown as a reason."""
