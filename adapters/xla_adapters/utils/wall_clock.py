"""`WallClock`: divides the wall time of a run among what the loop does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

# What a training loop spends time on: positions in `WallClock.seconds`. Plain numbers, because a switch between them
# must cost little.
OTHER: Final = 0
SETUP: Final = 1
STEP: Final = 2
COMPILE: Final = 3
INPUT: Final = 4
EVALUATION: Final = 5
SAVE: Final = 6
CALLBACKS: Final = 7

KINDS: Final = (
    "other host code",
    "setup",
    "steps",
    "compile",
    "input wait",
    "evaluation",
    "saves",
    "callbacks",
)


class WallClock:
    """Knows at each moment what the loop does, and adds the time that passes to that kind.

    A switch is one look at the clock and no allocation, so that a step can have several. Only time of the thread that
    switches is divided; background threads are not seen.

    Args:
        clock: returns monotonic seconds; replaced in tests.

    Attributes:
        seconds: for each of `KINDS`.
        is_running: whether time is being counted.
    """

    __slots__ = ("_clock", "_now", "_since", "is_running", "seconds")

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._now = OTHER
        self._since = 0.0
        self.seconds = [0.0] * len(KINDS)
        self.is_running = False

    def start(self, kind: int = SETUP) -> None:
        """Starts counting from zero."""
        self.seconds = [0.0] * len(KINDS)
        self._now, self.is_running = kind, True
        self._since = self._clock()

    def stop(self) -> None:
        """Stops counting."""
        self.switch(OTHER)
        self.is_running = False

    def switch(self, kind: int) -> int:
        """From now on the loop does something else; returns what it did before. Does nothing when not running."""
        before = self._now
        if self.is_running:
            now = self._clock()
            self.seconds[before] += now - self._since
            self._since = now
            self._now = kind
        return before

    def end(self, kind: int) -> None:
        """If the loop does this, it goes on with `OTHER`."""
        if self._now == kind:
            self.switch(OTHER)

    def during(self, kind: int) -> During:
        """A context in which the loop does something else."""
        return During(self, kind)

    def move(self, seconds: float, kind: int) -> None:
        """The last `seconds` of what the loop is doing now were of another kind."""
        if self.is_running:
            self.seconds[self._now] -= seconds
            self.seconds[kind] += seconds

    def update(self) -> list[float]:
        """`seconds` up to now; not to be changed."""
        self.switch(self._now)
        return self.seconds


class During:
    """The context of `WallClock.during`: a class, which costs less than a generator.

    Args:
        clock: that is switched.
        kind: what the loop does inside.
    """

    __slots__ = ("_before", "_clock", "_kind")

    def __init__(self, clock: WallClock, kind: int) -> None:
        self._clock = clock
        self._kind = kind

    def __enter__(self) -> None:
        self._before = self._clock.switch(self._kind)

    def __exit__(self, *error: object) -> None:
        self._clock.switch(self._before)
