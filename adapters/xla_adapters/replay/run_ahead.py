"""`RunAhead`: limits how many replayed steps the host is ahead of the device."""

from __future__ import annotations

import time
from collections.abc import Callable

# Replays between two waits. Many, because after a wait the host's caches are cold...
WRITES_KEPT = 8
# ...but they may take no longer than this in all, because a save or Ctrl-C waits for them.
SECONDS_AHEAD = 0.5


class RunAhead:
    """Decides after which replays the values are released that the replays have replaced.

    After a release, only `TakenValues` references the values whose buffers executions reuse, and it waits for these
    executions. The duration of that wait cannot be measured in one place. So the time between two releases is
    measured, which is the pace of host and device together.

    Args:
        clock: the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._kept = 1
        self._writes = 0
        self._forgot: float | None = None

    def written(self, forget: Callable[[], object]) -> None:
        """Called after each replay.

        Args:
            forget: releases the values that all replays so far have replaced.
        """
        self._writes += 1
        if self._writes < self._kept:
            return
        forget()
        now = self._clock()
        if self._forgot is not None:
            pace = max((now - self._forgot) / self._writes, 1e-6)
            # At most doubled: the first steps are fast for the host, however long the device takes.
            self._kept = max(1, min(WRITES_KEPT, 2 * self._kept, int(SECONDS_AHEAD / pace)))
        self._forgot = now
        self._writes = 0
