"""Where the time of a run goes: `WallClock` divides it, `StepTimes` has each step and the cause of the slow ones."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

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


_NOT_STEPPING = frozenset({SETUP, COMPILE, EVALUATION, SAVE})


def stepping(seconds: Sequence[float]) -> float:
    """The time that all rates per second are of: without set-up, compiles and loads of programs, evaluations, saves.

    Args:
        seconds: for each of `KINDS`.
    """
    return sum(part for kind, part in enumerate(seconds) if kind not in _NOT_STEPPING)


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


# A step is slow if it takes longer than so many times the median of those before it.
_SLOW = 2.0
# So many steps are between two looks at the median.
_WINDOW = 32
# Slow steps that are kept; of more, the slowest.
_KEPT = 200
# The first ones are noted, and looked at again when there is a median.
_FIRST = 3


@dataclass(frozen=True, kw_only=True)
class SlowStep:
    """A step that took much longer than those before it.

    Attributes:
        step: its number in this run, from 1.
        seconds: how long it took, from the end of the step before.
        cause: what it was slow by: one of `KINDS`.
        cause_seconds: how much of its time that was.
    """

    step: int
    seconds: float
    cause: str
    cause_seconds: float

    def __str__(self) -> str:
        return f"step {self.step}: {self.seconds:.3f} s, of which {self.cause} {self.cause_seconds:.3f} s"


class StepTimes:
    """Notes when each step ends. A step lasts from the end of the one before, with all that happens in between.

    Args:
        clock: divides the time of the run.

    Attributes:
        seconds: of each step.
        slow: the slow steps, in order.
        compiled: the numbers of the steps that compiled or loaded a program.
    """

    __slots__ = ("_before", "_clock", "_ended", "_limit", "compiled", "seconds", "slow")

    def __init__(self, clock: WallClock) -> None:
        self._clock = clock
        self.start()

    def start(self) -> None:
        """Starts from zero; the first step begins."""
        self.seconds = array("d")
        self.slow: list[SlowStep] = []
        self.compiled: set[int] = set()
        self._limit = 0.0
        self.begin()

    def begin(self) -> None:
        """The next step begins now: what came before was no part of it."""
        self._before = self._clock.update()[:]
        self._ended = sum(self._before)

    def step_ended(self) -> None:
        """A step has ended."""
        now = self._clock.update()
        ended = sum(now)
        passed = ended - self._ended
        if passed > self._limit:
            self._note_slow(passed, now)
        if now[COMPILE] > self._before[COMPILE]:
            self.compiled.add(len(self.seconds) + 1)
        self._before, self._ended = now[:], ended
        self.seconds.append(passed)
        if len(self.seconds) % _WINDOW == 0 or len(self.seconds) == _FIRST:
            latest = sorted(self.seconds[-_WINDOW:])
            self._limit = _SLOW * latest[len(latest) // 2]
            if len(self.seconds) == _FIRST:
                self.slow = [item for item in self.slow if item.seconds > self._limit]

    def _note_slow(self, passed: float, now: list[float]) -> None:
        parts = [after - before for after, before in zip(now, self._before, strict=True)]
        cause = max(range(len(parts)), key=parts.__getitem__)
        number = len(self.seconds) + 1
        self.slow.append(SlowStep(step=number, seconds=passed, cause=KINDS[cause], cause_seconds=parts[cause]))
        if len(self.slow) > _KEPT:
            self.slow.remove(min(self.slow, key=lambda item: item.seconds))

    def percentiles(self) -> dict[str, float]:
        """The median, the 90th, 99th and the slowest, in seconds; empty without steps."""
        ordered = sorted(self.seconds)
        if not ordered:
            return {}
        last = len(ordered) - 1
        places = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "slowest": 1.0}
        return {name: ordered[round(place * last)] for name, place in places.items()}

    def curve(self, points: int = 400) -> list[dict[str, float]]:
        """The steps in at most so many groups: the number of each group's first step, its median and its slowest.

        Steps that compiled or loaded a program are left out.
        """
        steps = [(number, took) for number, took in enumerate(self.seconds, 1) if number not in self.compiled]
        size = max(1, -(-len(steps) // points))
        found = []
        for first in range(0, len(steps), size):
            group = sorted(took for _, took in steps[first : first + size])
            found.append({"step": steps[first][0], "median": group[len(group) // 2], "slowest": group[-1]})
        return found

    def as_dict(self) -> dict[str, Any]:
        """Percentiles and slow steps, as JSON has them."""
        return {"steps": len(self.seconds), **self.percentiles(), "slow": list(map(asdict, self.slow))}
