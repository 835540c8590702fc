"""Names in a profile what the host does: the step, in it forward, backward and optimizer, and what is between steps.

A step that is replayed is one span, `replay`. While no profile is recorded, none of this does anything.
"""

from __future__ import annotations

from collections.abc import Callable

from xla_adapters.runtime import get_runtime

FORWARD, BACKWARD, OPTIMIZER, REPLAY = "forward", "backward", "optimizer", "replay"
BETWEEN = "data and other code between steps"


class ProfileSpans:
    """The spans that are open in the profile that is being recorded. A process records one profile at a time."""

    def __init__(self) -> None:
        self._is_recording = False
        self._open: dict[str, Callable[[], None]] = {}

    def start(self) -> None:
        """A profile is being recorded from now on."""
        self._is_recording = True

    def stop(self) -> None:
        """Ends all spans: the profile is about to end."""
        self.end_all()
        self._is_recording = False

    def begin(self, name: str) -> None:
        """Begins a span, and ends the forward: whatever has a name of its own is no part of it."""
        if self._is_recording:
            self.end(FORWARD)
            self.end(name)
            self._open[name] = get_runtime().device.mark_profile(name)

    def end(self, name: str) -> None:
        """Ends a span, if it is open."""
        if name in self._open:
            self._open.pop(name)()

    def end_all(self) -> None:
        """Ends the spans that are open, the last one first."""
        for name in reversed(list(self._open)):
            self.end(name)


SPANS = ProfileSpans()
